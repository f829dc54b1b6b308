
-- The fast path: checks under the limits that their counters were written under, with small numbers and a clock that was not
-- set back. The whole call happens at one moment, so a counter is a single number here: its level now. The algorithms differ
-- only in how the level is read and written. A state that this script cannot have written takes the general path, which
-- reports it; comparisons are written so that they are false for a number that is not a number.
--
-- An algorithm defines its functions if the batch has a limit of it:
--   read[code](key, limit)          returns the level; false if the counter needs the general path
--   write[code](key, limit, level)  writes the counter that was read, with another level
local TOKEN_BUCKET, CALENDAR_WINDOW, CONCURRENCY = 3, 5, 6
local read, write = {}, {}
local CHECK, PEEK = 0, 1

-- Reads a limit. A counter is exhausted at the level `ceiling`; a unit has `unit` parts.
local function read_limit(text, at)
  local code, amount, window, capacity, phase, units, micros = unpack_from(LIMIT, text, at)
  local unit = code == TOKEN_BUCKET and micros or 1
  local limit = { code = code, amount = amount, window = window, capacity = capacity, phase = phase,
    units = units, micros = micros, unit = unit, ceiling = capacity * unit }
  if code == CALENDAR_WINDOW then -- the edges of two periods, in the place of other numbers
    limit.start, limit.ends, limit.next_end = phase, units, micros
  end
  return limit
end

local limits, is_used = {}, {}
for at = 1, #ARGV[2], LIMIT_BYTES do
  local limit = read_limit(ARGV[2], at)
  limits[#limits + 1] = limit
  is_used[limit.code] = true
end

-- Counters with calendar windows take the general path.
if is_used[CALENDAR_WINDOW] then
  read[CALENDAR_WINDOW] = function()
    return false
  end
end

-- By key: the level (false: left to the general path), its limit, and the level to write.
local levels, limit_of, changed = {}, {}, {}
-- By key: the expiry time of the key, and further values that are needed to write it.
local stored_ttl, extra = {}, {}
