-- tollgate: decides a batch of checks in order, each over several counters, all or none.
--
-- KEYS      the distinct counters of the batch; those of sliding logs come last
-- ARGV[1]   '<ddH'   now (-1: the server's clock), deadline (-1: none), how many KEYS are not sliding logs
-- ARGV[2]   limits, each '<Bdddddd': algorithm (1 fixed-window, 2 sliding-counter, 3 token-bucket,
--           4 sliding-log), amount, window, capacity, phase, and amount/window in lowest terms
-- ARGV[3]   the tiers of all checks in order, each '<BBI4HHd': operation (0 check, 1 peek, 2 charge,
--           3 refund), flags (1 shadow, 2 overdraft, 4 the next tier belongs to the same check, 8 a check of
--           this tier alone, whose key no other tier of the batch has), how many identical requests, which
--           key, which limit, cost; a refund adds '<d', the time of the charge to take back (-1: the newest)
-- reply     '<Bd': 0 decided or 1 too late (nothing ran), the time; then per tier '<I4I4dddd': how many
--           pass this tier, how many were charged to it, free units (below 0: debt), microseconds until the
--           next passes (0: now, -1: never), microseconds until nothing counts, and the surplus of the last
--           of those in parts of 1/rate
--
-- All times are whole microseconds, all numbers whole and below 2^53, where doubles are exact. Constant
-- arguments of commands are strings: Redis would format a number with every call. A key is
-- read once and written once, only if it changed, and always has a TTL.


local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
local pack, unpack_from, call = struct.pack, struct.unpack, redis.call

-- How much longer than needed a TTL may be, and how much longer it is for a clock that is moved by hand.
local TTL_SLACK_US, INJECTED_TTL_MS = 10000000, 3600000

local now, deadline, plain_keys = unpack_from('<ddH', ARGV[1])
local injected = now >= 0
if not injected then
  local time = call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
if deadline >= 0 and now > deadline then
  return pack('<Bd', 1, now)
end

local limits, position = {}, 1
while position <= #ARGV[2] do
  local code, amount, window, capacity, phase, units, micros
  code, amount, window, capacity, phase, units, micros, position = unpack_from('<Bdddddd', ARGV[2], position)
  limits[#limits + 1] = { code = code, amount = amount, window = window, capacity = capacity, phase = phase,
    units = units, micros = micros }
end

local strings = plain_keys > 0 and call('MGET', unpack(KEYS, 1, plain_keys)) or {}

-- One reply for each tier of the plan, behind a header.
local plan, replies = ARGV[3], { pack('<Bd', 0, now) }
