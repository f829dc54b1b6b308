-- sluicegate: decides a batch of checks in order. Each check charges all of its counters or none.
--
-- KEYS     the distinct keys of the batch: counters, lease records and records of holds; then sliding logs; then sorted sets, which are
--          concurrency counters and indexes of holds. For keys on several slots of one Cluster node: only the first one, and the
--          others from ARGV[4] on
-- ARGV[1]  '<ddHH': now (-1: the server's clock), deadline (-1: none), number of KEYS before the sliding logs, number of KEYS before
--          the sorted sets. If the call has calendar windows, then '<dd': the time from which and until which every one of them has
--          a period
-- ARGV[2]  limits, each '<Bdddddd': algorithm (its code), amount, window, capacity, phase, and amount/window in lowest terms. A
--          fixed window that follows a calendar has the code 5, the longest period as its window, and instead of the last
--          three numbers the start and the end of a period and the end of the next one
-- ARGV[3]  the checks in order, in groups that differ only in counts and keys. A group is
--            '<BBBHd'  operation (0 check, 1 peek, 2 charge, 3 refund; with holds also 4 settle, 5 renew, 6 revert, 7 check with an id
--                      that must not be known); path (0 any, 1 the fast bucket path: checks of one small token bucket each, which no
--                      other check of the batch uses, 2 with leases, 3 with holds); number of tiers; number of checks; time of the
--                      charge to refund (-1: the newest). To revert a hold: when it was denied; it must
--                      have been live then, and not repeated since
--            '<I4'     with holds: number of bytes of the group that follow
--            '<BHd'    for each tier: flags (1 shadow, 2 overdraft, 4 keep the estimate, 8 release expired holds), index of the limit,
--                      cost; with holds, in the place of the cost: the most units that are charged beyond an estimate (for a
--                      settlement: -1 if the bound of the hold applies)
--            '<dd'     with leases, after each tier: the most units that may be leased, and how long its record counts them
--            '<I4'     for each check: number of identical requests
--            '<dH'     with holds, after it: time until the hold expires, length of its id (0: not a hold); then the id
--            '<I4'     with leases, after it: further requests to charge in advance; for a refund: leased units that were spent
--            '<d'      with holds, before each of the following: the cost of the tier
--            '<H'      for each tier of the check: index of the key
--            '<H'      with leases, after each of them: index of the lease record (0: the limit has no lease)
--            '<HH'     with holds, after each of them: index of the index of holds (0: a concurrency counter, which is one), index of the
--                      record of the hold (0: not a hold)
-- reply    '<Bd': status (0 decided; or nothing ran: 1 too late, 2 some keys are not on this node, 3 a calendar window has no
--          period at this time) and time; then
--            '<d'      for each check: number of requests that passed, including those charged in advance
--            '<d'      for each of its tiers: its level before, in parts of a unit for a token bucket, otherwise in units
--          If the number that passed is -1, the levels are unused, and the tiers of the check are among the records at the end:
--            '<I4I4ddddd'  requests that pass this tier; requests charged to it; available units (negative in debt);
--                          microseconds until the next request passes (0: now, -1: never, -2: the stored state of this tier
--                          cannot be read, so the check was not decided and charged nothing); microseconds until no units
--                          count; the unused part of the last of these in units of 1/rate; with leases, leased units
--            '<BI4ddd'     with holds, after each of them: outcome (hold.lua); expired holds of the counter that were released; when
--                          this hold was made; when it expires; units that it has charged
-- Without ARGV, a probe: an empty write to KEYS[1], which does not exist before or after. It needs the same permissions as a
-- decision.
--
-- All times are whole microseconds. All numbers are whole and below 2^53, where doubles are exact. Constant command arguments
-- are strings, because Redis would format a number on every call. The string of a counter is read once and written once if it changed.
-- Every key always has a TTL. A key that this script cannot have written is never changed.

local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
local pack, unpack_from, rep = struct.pack, struct.unpack, string.rep
local call, pcall_redis = redis.call, redis.pcall
local KEYS, ARGV = KEYS, ARGV

if #ARGV == 0 then
  return call('SETRANGE', KEYS[1], '0', '')
end

local MAX_EXACT = 2 ^ 53 - 1
-- How much longer than needed a TTL may be, and how much is added for an injected clock.
local TTL_SLACK_US, INJECTED_TTL_MS = 10000000, 3600000
-- Stored numbers are at most this. The end of a TTL may exceed it by a clock reading.
local MAX_STORED, MAX_TTL_END = 2 ^ 53, 2 ^ 54
-- The answer of a tier at the end of the reply.
local ANSWER, ANSWER_BYTES = '<I4I4ddddd', 48
local NO_ANSWER = pack(ANSWER, 0, 0, 0, 0, 0, 0, 0)
-- The header and the slots of a sliding log. Its totals wrap around at `LOG_WRAP`. Every log has fewer slots than `MAX_LOG_SLOTS`.
local LOG_HEADER, LOG_HEADER_BYTES, LOG_HEADER_END = '<ddddddddd', 72, '71'
local SLOT, SLOT_BYTES, LOG_WRAP, MAX_LOG_SLOTS = '<I7I3', 10, 2 ^ 24, 2 ^ 20

local HEADER_BYTES = 20
local now, deadline, fixed_keys, string_keys = unpack_from('<ddHH', ARGV[1])
local injected = now >= 0
if not injected then
  local time = call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
if deadline >= 0 and now > deadline then
  return pack('<Bd', 1, now)
end
if #ARGV[1] > HEADER_BYTES then
  local first, past = unpack_from('<dd', ARGV[1], HEADER_BYTES + 1)
  if now < first or now >= past then
    return pack('<Bd', 3, now)
  end
end

-- Returns whether the script can have stored these five numbers.
local function are_stored(a, b, c, d, e)
  return a >= 0 and a <= MAX_STORED and b >= 0 and b <= MAX_STORED and c >= 0 and c <= MAX_STORED and d >= 0
    and d <= MAX_STORED and e >= 0 and e <= MAX_TTL_END and a % 1 + b % 1 + c % 1 + d % 1 + e % 1 == 0
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

-- The stored state of each key, for a sliding log only its header, for a concurrency counter its units. False if the key does not exist;
-- '', which no algorithm stores, if it has another type. All keys are read before the first write.
local stored, is_one_slot = {}, #ARGV == 3
if not is_one_slot then
  KEYS = { KEYS[1], unpack(ARGV, 4) }
elseif fixed_keys > 0 then
  stored = call('MGET', unpack(KEYS, 1, fixed_keys))
end
-- A Cluster node rejects commands for keys that it does not serve or that have migrated, and MGET for keys of several slots.
-- Sorted sets of one slot are read when they are used, because many of them need no reading.
for key = #stored + 1, is_one_slot and string_keys or #KEYS do
  local raw
  if key > string_keys then
    raw = pcall_redis('ZSCORE', KEYS[key], '')
  elseif key > fixed_keys then
    raw = pcall_redis('GETRANGE', KEYS[key], '0', LOG_HEADER_END)
    raw = raw ~= '' and raw
  else
    raw = pcall_redis('GET', KEYS[key])
  end
  if type(raw) == 'table' then
    if not string.find(raw.err, 'WRONGTYPE', 1, true) then
      return is_one_slot and raw or pack('<Bd', 2, now)
    end
    raw = ''
  end
  stored[key] = raw
end

-- Returns the stored state of a sorted set.
local function stored_set(key)
  local raw = stored[key]
  if raw == nil then
    raw = pcall_redis('ZSCORE', KEYS[key], '')
    raw = type(raw) == 'table' and '' or raw
    stored[key] = raw
  end
  return raw
end

-- MGET returns nothing for a key of another type, and SET would overwrite it.
local missing
for key = 1, is_one_slot and string_keys or 0 do
  if not stored[key] then
    missing = missing or {}
    missing[#missing + 1] = KEYS[key]
  end
end
if missing and call('EXISTS', unpack(missing)) > 0 then
  for key = 1, string_keys do
    if not stored[key] and call('EXISTS', KEYS[key]) == 1 then
      stored[key] = ''
    end
  end
end

-- The reply of each group.
local plan, replies = ARGV[3], {}
local GROUP, LIMIT, TIER = '<BBBHd', '<Bdddddd', '<BHd'
local LIMIT_BYTES, TIER_BYTES = 49, 11
-- The paths of a group.
local FAST_BUCKET, LEASED, WITH_HOLDS = 1, 2, 3

-- The work that remains for the following paths: the position of each group in the plan, and single checks by group and
-- position.
local group_starts, remaining = {}, {}
