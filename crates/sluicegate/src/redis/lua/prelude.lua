-- sluicegate: decides a batch of checks in order. Each check charges all of its counters or none.
--
-- KEYS      the distinct counters of the batch, sliding logs last. For counters on several slots of one Cluster node: only
--           the first one, and the others from ARGV[4] on
-- ARGV[1]   '<ddH': now (-1: the server's clock), deadline (-1: none), number of KEYS that are not sliding logs
-- ARGV[2]   limits, each '<Bdddddd': algorithm (its code), amount, window, capacity, phase, and amount/window in lowest
--           terms
-- ARGV[3]   the checks in order, in groups that differ only in counts and keys. A group is '<BBBHd': operation
--           (0 check, 1 peek, 2 charge, 3 refund), 1 for the fast bucket path (checks of one small token bucket each, which
--           no other check of the batch uses), number of tiers, number of checks, and time of the charge to refund
--           (-1: the newest); for each tier '<BHd': flags (1 shadow, 2 overdraft), index of the limit, cost; for each check
--           '<I4', number of identical requests, and for each of its tiers '<H', index of the key
-- reply     '<Bd': status (0 decided, 1 too late, nothing ran, 2 some counters are not on this node, nothing ran) and time;
--           then for each check '<d', number of requests that passed, and for each tier '<d', its level before: parts of a
--           unit for a token bucket, otherwise units. If the number that passed is -1, the levels are unused, and the tiers of
--           the check are among the records at the end, each '<I4I4dddd': requests that pass this tier, requests charged to
--           it, free units (negative in debt), microseconds until the next request passes (0: now, -1: never),
--           microseconds until no units count, and the unused part of the last of these in units of 1/rate
--
-- All times are whole microseconds. All numbers are whole and below 2^53, where doubles are exact. Constant command arguments
-- are strings, because Redis would format a number on every call. Each key is read once, written once if it changed, and
-- always has a TTL.


local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
local pack, unpack_from, call, rep = struct.pack, struct.unpack, redis.call, string.rep
local KEYS, ARGV = KEYS, ARGV

-- How much longer than needed a TTL may be, and how much is added for an injected clock.
local TTL_SLACK_US, INJECTED_TTL_MS = 10000000, 3600000

local now, deadline, fixed_keys = unpack_from('<ddH', ARGV[1])
local injected = now >= 0
if not injected then
  local time = call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
if deadline >= 0 and now > deadline then
  return pack('<Bd', 1, now)
end

-- Returns the new expiry time of a key whose units count for `needed` more microseconds, and its TTL as text for PX. Returns
-- nil if the current TTL, until `ttl_until`, is sufficient: a renewal costs as much as the write itself.
local function renewed_ttl(ttl_until, window, needed)
  local left, lifetime = ttl_until - now, 2 * window
  if lifetime < needed then
    lifetime = needed
  end
  if left >= needed and left <= lifetime + TTL_SLACK_US then
    return nil
  end
  -- Redis counts from the last whole millisecond; an injected clock adds an hour
  local millis = ceil(lifetime / 1000) + 1 + (injected and INJECTED_TTL_MS or 0)
  return now + lifetime, string.format('%.0f', millis)
end

-- The stored state of each key that is not a sliding log.
local fixed_states = {}
if #ARGV > 3 then
  -- A Cluster node rejects commands for keys that it does not serve or that have migrated. Every key is therefore read before
  -- the first write, so that the batch runs completely or not at all. MGET rejects keys of several slots.
  KEYS = { KEYS[1], unpack(ARGV, 4) }
  for key = 1, #KEYS do
    local raw
    if key <= fixed_keys then
      raw = redis.pcall('GET', KEYS[key])
      fixed_states[key] = raw
    else
      raw = redis.pcall('GETRANGE', KEYS[key], '0', '0')
    end
    if type(raw) == 'table' then
      return pack('<Bd', 2, now)
    end
  end
elseif fixed_keys > 0 then
  fixed_states = call('MGET', unpack(KEYS, 1, fixed_keys))
end

-- The reply of each group.
local plan, replies = ARGV[3], {}
local GROUP, LIMIT, TIER = '<BBBHd', '<Bdddddd', '<BHd'
local LIMIT_BYTES, TIER_BYTES = 49, 11

-- The work that remains for the following paths: the position of each group in the plan, and single checks by group and
-- position.
local group_starts, remaining = {}, {}
