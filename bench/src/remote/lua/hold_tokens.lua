-- A simple hold on a token budget: charges the estimate to a fixed window, which begins with its first request, and stores it.
-- KEYS: the counter, the hold. ARGV: limit, window in milliseconds, estimate, lifetime of the hold in milliseconds. Reply: 1 (allowed)
-- or 0 (denied), and the wait in milliseconds.
local used = tonumber(redis.call('GET', KEYS[1])) or 0
if used + tonumber(ARGV[3]) > tonumber(ARGV[1]) then
  return { 0, redis.call('PTTL', KEYS[1]) }
end
redis.call('INCRBY', KEYS[1], ARGV[3])
if used == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return { 1, 0 }
