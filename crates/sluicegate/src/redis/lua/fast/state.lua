
-- The fast path: checks under the limits that their counters were written under, with small numbers and a clock that was not
-- set back. The whole call happens at one moment, so a counter is a single number here: its level now. The algorithms differ
-- only in how the level is read and written. A state that this script cannot have written takes the general path, which
-- reports it; comparisons are written so that they are false for a number that is not a number.
--
-- An algorithm defines its functions if the batch has a limit of it:
--   read[code](key, limit)          returns the level; false if the counter needs the general path
--   write[code](key, limit, level)  writes the counter that was read, with another level
local TOKEN_BUCKET, CALENDAR_WINDOW = 3, 5
local read, write = {}, {}

-- A counter is exhausted at the level `ceiling`; a unit has `unit` parts.
local limits, is_used = {}, {}
for at = 1, #ARGV[2], LIMIT_BYTES do
  local code, amount, window, capacity, phase, units, micros = unpack_from(LIMIT, ARGV[2], at)
  local unit = code == TOKEN_BUCKET and micros or 1
  limits[#limits + 1] = { code = code, amount = amount, window = window, capacity = capacity, phase = phase,
    units = units, micros = micros, unit = unit, ceiling = capacity * unit }
  is_used[code] = true
end

-- The edges of two periods of a calendar, in the place of other numbers. Its counters take the general path.
if is_used[CALENDAR_WINDOW] then
  read[CALENDAR_WINDOW] = function()
    return false
  end
  for _, limit in ipairs(limits) do
    if limit.code == CALENDAR_WINDOW then
      limit.start, limit.ends, limit.next_end = limit.phase, limit.units, limit.micros
    end
  end
end

-- By key: the expiry time of the key, and further values that are needed to write it.
local stored_ttl, extra = {}, {}
