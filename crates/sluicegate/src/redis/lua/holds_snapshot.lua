-- Reads the index of a counter's holds. hold.lua describes its members, concurrency.lua the empty one.
--
-- KEYS[1]   the index
-- ARGV[1]   the most holds to read
-- ARGV[2]   the time in microseconds, or '' for that of the server
-- ARGV[3]   how long a hold that has expired stays in the index, in microseconds: used if there are too many to read each of them
-- reply     the server's seconds and microseconds; the units of a concurrency counter or ''; the number of live holds, not exact if all of them
--           are read; those that leave the index first, with their scores, and one more if there are further ones; the first and the last score
--           of the index, or ''; the units of the holds whose score has passed, or '' if there are too many. An error text instead of the number
--           if the key has another type

local key, most, time = KEYS[1], tonumber(ARGV[1]), redis.call('TIME')
local now = tonumber(ARGV[2]) or time[1] * 1000000 + time[2]
local units = redis.pcall('ZSCORE', key, '')
if type(units) == 'table' then
  if not string.find(units.err, 'WRONGTYPE', 1, true) then
    return units
  end
  return { time[1], time[2], '', 'not a sorted set', {}, '', '', '' }
end

local function after(moment)
  return string.format('(%.0f', moment)
end

local function first(from, to, count)
  return redis.call('ZRANGEBYSCORE', key, from, to, 'WITHSCORES', 'LIMIT', '0', string.format('%d', count))
end

local function units_of(holds)
  local sum = 0
  for place = 1, #holds, 2 do
    if #holds[place] < 17 then
      return 0
    end
    local _, _, own = struct.unpack('<Bdd', holds[place])
    sum = sum + own
  end
  return string.format('%.0f', sum)
end

local from = after(now)
local holds = first(from, '+inf', most + 1)
if #holds > 2 * most then
  from = after(now + ARGV[3])
  holds = first(from, '+inf', most + 1)
end
local ended = first('0', string.format('%.0f', now), most + 1)
local count = redis.call('ZCOUNT', key, from, '+inf')
local last = redis.call('ZREVRANGE', key, '0', '0', 'WITHSCORES')
last = last[1] and last[1] ~= '' and last[2] or ''
return { time[1], time[2], units or '', count, holds, ended[2] or holds[2] or '', last,
  #ended > 2 * most and '' or units_of(ended) }
