-- Settles a simple hold: replaces the estimate with the actual cost, unless the window has ended. KEYS: the counter, the hold. ARGV: the
-- actual cost. Reply: 1 (settled) or 0 (unknown, expired or settled before).
local estimate = redis.call('GETDEL', KEYS[2])
if not estimate then
  return 0
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('INCRBY', KEYS[1], ARGV[1] - estimate)
end
return 1
