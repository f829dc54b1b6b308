-- A plain GCRA, as used by many services. KEYS: one per tier. ARGV: interval and burst per tier, in microseconds and
-- units. Reply: 1 (allowed) or 0 (denied), and the wait in microseconds. With several keys: all or none.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ahead = {}
for i = 1, #KEYS do
  local interval, burst = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  local tat = math.max(tonumber(redis.call('GET', KEYS[i])) or now, now)
  ahead[i] = tat + interval - now
  if ahead[i] > interval * burst then
    return { 0, math.ceil(ahead[i] - interval * burst) }
  end
end
for i = 1, #KEYS do
  redis.call('SET', KEYS[i], string.format('%.0f', now + ahead[i]), 'PX', math.ceil(ahead[i] / 1000))
end
return { 1, 0 }
