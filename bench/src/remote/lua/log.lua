-- A plain sliding log in a sorted set. KEYS: one. ARGV: limit, window in microseconds, a unique member.
-- Reply: 1 (allowed) or 0 (denied), and the remaining units.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - window))
local used = redis.call('ZCARD', KEYS[1])
if used >= limit then
  return { 0, 0 }
end
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[3])
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000))
return { 1, limit - used - 1 }
