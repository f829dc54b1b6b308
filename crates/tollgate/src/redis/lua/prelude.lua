-- tollgate: decides a batch of checks in order, each over several counters, all or none.
--
-- KEYS      the distinct counters of the batch; those of sliding logs come last. For counters on several slots of one
--           Cluster node: the first of them only, and the others from ARGV[4] on
-- ARGV[1]   '<ddH'   now (-1: the server's clock), deadline (-1: none), how many KEYS are not sliding logs
-- ARGV[2]   limits, each '<Bdddddd': algorithm (1 fixed-window, 2 sliding-counter, 3 token-bucket,
--           4 sliding-log), amount, window, capacity, phase, and amount/window in lowest terms
-- ARGV[3]   the checks in order, in groups that differ in counts and keys only. A group is '<BBBHd': operation
--           (0 check, 1 peek, 2 charge, 3 refund), 1 if they are plain (checks of one small token bucket each, which
--           no other check has), how many tiers, how many checks, and the time of the charge to refund (-1: the
--           newest); for each tier '<BHd': flags (1 shadow, 2 overdraft), which limit, cost; and for each check
--           '<I4', how many identical requests, and for each of its tiers '<H', which key
-- reply     '<Bd': 0 decided, 1 too late (nothing ran) or 2 some counters are not on this node (nothing ran), and the
--           time; then for each check '<d', how many requests passed, and for each tier '<d', what it held before:
--           parts of a unit for a token bucket, else units. Where -1 passed, this means nothing, and the check's tiers
--           are among the records at the end, each '<I4I4dddd': how many pass this tier, how many were charged to it,
--           free units (below 0: debt), microseconds until the next passes (0: now, -1: never), microseconds until
--           nothing counts, and the surplus of the last of those in parts of 1/rate
--
-- All times are whole microseconds, all numbers whole and below 2^53, where doubles are exact. Constant
-- arguments of commands are strings: Redis would format a number with every call. A key is
-- read once and written once, only if it changed, and always has a TTL.


local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
local pack, unpack_from, call, rep = struct.pack, struct.unpack, redis.call, string.rep
local KEYS, ARGV = KEYS, ARGV

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

-- Until when a key should live that counts for `needed` more, and that as text for PX; nil when the TTL it has,
-- until `ttl_until`, will do: renewing it costs as much as the write itself.
local function renewed_ttl(ttl_until, window, needed)
  local left, lifetime = ttl_until - now, 2 * window
  if lifetime < needed then
    lifetime = needed
  end
  if left >= needed and left <= lifetime + TTL_SLACK_US then
    return nil
  end
  -- Redis counts from the last whole millisecond; a clock that is moved by hand gets an hour more
  local millis = ceil(lifetime / 1000) + 1 + (injected and INJECTED_TTL_MS or 0)
  return now + lifetime, string.format('%.0f', millis)
end

-- What is stored for each key that is not a sliding log.
local strings = {}
if #ARGV > 3 then
  -- A Cluster node rejects a command for a key that it does not serve, or that has migrated. So every key is read
  -- before the first write: the batch runs as a whole or not at all. MGET would be rejected for keys of several slots.
  KEYS = { KEYS[1], unpack(ARGV, 4) }
  for key = 1, #KEYS do
    local raw
    if key <= plain_keys then
      raw = redis.pcall('GET', KEYS[key])
      strings[key] = raw
    else
      raw = redis.pcall('GETRANGE', KEYS[key], '0', '0')
    end
    if type(raw) == 'table' then
      return pack('<Bd', 2, now)
    end
  end
elseif plain_keys > 0 then
  strings = call('MGET', unpack(KEYS, 1, plain_keys))
end

-- One part of the reply for each group.
local plan, replies = ARGV[3], {}
local GROUP, LIMIT, TIER = '<BBBHd', '<Bdddddd', '<BHd'
local LIMIT_BYTES, TIER_BYTES = 49, 11

-- The groups and checks that are left to what follows: where each group starts, and the checks by group and place.
local starts, rest = {}, {}
