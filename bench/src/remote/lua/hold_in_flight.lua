-- A simple hold on a token budget, as in hold_tokens.lua, and on an in-flight limit: a sorted set of ids, ordered by expiry.
-- KEYS: the counter, the hold, the sorted set. ARGV: limit, window in milliseconds, estimate, lifetime of the hold in milliseconds,
-- in-flight limit, id. Reply: 1 (allowed) or 0 (denied), and the wait in milliseconds.
local used = tonumber(redis.call('GET', KEYS[1])) or 0
if used + tonumber(ARGV[3]) > tonumber(ARGV[1]) then
  return { 0, redis.call('PTTL', KEYS[1]) }
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[5]) then
  return { 0, redis.call('PTTL', KEYS[3]) }
end
redis.call('INCRBY', KEYS[1], ARGV[3])
if used == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
redis.call('ZADD', KEYS[3], now + ARGV[4], ARGV[6])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return { 1, 0 }
