-- Reads one stored counter.
--
-- KEYS[1]   the counter
-- ARGV[1]   for a sliding log, the number of newest entries to return; otherwise 0
-- reply     the server's seconds and microseconds, the stored state (for a sliding log, its header) or '', and the entries,
--           oldest first. A key that is not a string has a state that the script never stores

local HEADER, HEADER_BYTES, BYTES = '<ddddddddd', 72, 10
local key, newest = KEYS[1], tonumber(ARGV[1])
local time = redis.call('TIME')
local header = redis.pcall('GETRANGE', key, '0', newest > 0 and HEADER_BYTES - 1 or '-1')
if type(header) == 'table' then
  if not string.find(header.err, 'WRONGTYPE', 1, true) then
    return header
  end
  return { time[1], time[2], 'not a string', '' }
end
if newest == 0 then
  return { time[1], time[2], header, '' }
end

local function entries()
  local _, _, _, _, head, length, _, _, capacity = struct.unpack(HEADER, header)
  local count = math.min(newest, length)
  if count == 0 then
    return ''
  end
  local from = (head + length - count) % capacity
  local upto_end = math.min(count, capacity - from)
  local first = HEADER_BYTES + from * BYTES
  local found = redis.call('GETRANGE', key, first, first + upto_end * BYTES - 1)
  if count > upto_end then
    found = found .. redis.call('GETRANGE', key, HEADER_BYTES, HEADER_BYTES + (count - upto_end) * BYTES - 1)
  end
  return found
end

-- a header that this limiter did not write may be invalid: the caller validates the reply
local is_found, found = pcall(entries)
return { time[1], time[2], header, is_found and found or '' }
