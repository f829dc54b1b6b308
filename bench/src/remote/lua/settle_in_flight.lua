-- Settles a simple hold of hold_in_flight.lua. KEYS: the counter, the hold, the sorted set. ARGV: the actual cost, id. Reply: 1 (settled)
-- or 0 (unknown, expired or settled before).
redis.call('ZREM', KEYS[3], ARGV[2])
local estimate = redis.call('GETDEL', KEYS[2])
if not estimate then
  return 0
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('INCRBY', KEYS[1], ARGV[1] - estimate)
end
return 1
