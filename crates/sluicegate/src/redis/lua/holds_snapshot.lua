-- Reads the index of a counter's holds. hold.lua describes its members, concurrency.lua the empty one.
--
-- KEYS[1]   the index
-- ARGV[1]   the most holds to read
-- reply     the server's seconds and microseconds, the units of a concurrency counter or '', the number of live holds, the first holds that
--           leave the index with their scores, and the score of the last one or ''; an error text instead of the number if the key has
--           another type

local key, time = KEYS[1], redis.call('TIME')
local units = redis.pcall('ZSCORE', key, '')
if type(units) == 'table' then
  if not string.find(units.err, 'WRONGTYPE', 1, true) then
    return units
  end
  return { time[1], time[2], '', 'not a sorted set', {}, '' }
end
local holds = redis.call('ZRANGEBYSCORE', key, '0', '+inf', 'WITHSCORES', 'LIMIT', '0', ARGV[1])
local last = redis.call('ZREVRANGE', key, '0', '0', 'WITHSCORES')
local count = redis.call('ZCOUNT', key, '0', '+inf')
return { time[1], time[2], units or '', count, holds, last[1] and last[1] ~= '' and last[2] or '' }
