
-- The straight path: checks under the limits that their counters were written under, with small numbers and a clock
-- that has not been set back. All that happens in a call happens at one moment, so that a counter is a single
-- number here: what it holds now, its level. How that is read and written is all that the algorithms differ in.
--
-- Each defines itself when the batch has a limit of its kind:
--   read[code](key, limit)          the level; false when it takes the general path to tell
--   write[code](key, limit, level)  writes what was read, with another level
local FIXED_WINDOW, SLIDING_COUNTER, TOKEN_BUCKET, SLIDING_LOG = 1, 2, 3, 4
local read, write = {}, {}

-- A counter is used up when it holds `ceiling`, in parts of which a unit has `unit`.
local limits, used = {}, {}
for at = 1, #ARGV[2], LIMIT_BYTES do
  local code, amount, window, capacity, phase, units, micros = unpack_from(LIMIT, ARGV[2], at)
  local unit = code == TOKEN_BUCKET and micros or 1
  limits[#limits + 1] = { code = code, amount = amount, window = window, capacity = capacity, phase = phase,
    units = units, micros = micros, unit = unit, ceiling = capacity * unit }
  used[code] = true
end

-- By key: until when its TTL goes, and what else is needed to write it.
local ttl_of, kept = {}, {}
