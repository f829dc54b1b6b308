-- A plain GCRA, as used by many services. KEYS: one. ARGV: interval in microseconds, burst in units. Reply: 1 (allowed)
-- or 0 (denied), and the wait in microseconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local tat = math.max(tonumber(redis.call('GET', KEYS[1])) or now, now)
local ahead = tat + interval - now
if ahead > interval * burst then
  return { 0, math.ceil(ahead - interval * burst) }
end
redis.call('SET', KEYS[1], string.format('%.0f', now + ahead), 'PX', math.ceil(ahead / 1000))
return { 1, 0 }
