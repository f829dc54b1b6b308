
-- sliding-log: the level is the sum of the entries that count; `extra` is its header. A log that has to grow, or of which many
-- entries have expired, takes the general path. See ../sliding_log.lua.
local SLIDING_LOG = 4
local LOG_HEADER, LOG_HEADER_BYTES, LOG_HEADER_END = '<dddddddddd', 80, '79'

if is_used[SLIDING_LOG] then
  local FETCH, WIDTH, SLOT, SLOT_BYTES, WRAP = 8, 3, '<I7I3', 10, 2 ^ 24

  read[SLIDING_LOG] = function(key, limit)
    local raw = call('GETRANGE', KEYS[key], '0', LOG_HEADER_END)
    if raw == '' then
      return false
    end
    local last, base, total, oldest, head, length, ttl_until, window, capacity, width = unpack_from(LOG_HEADER, raw)
    if window ~= limit.window or last >= now or length == 0 or width ~= WIDTH then
      return false
    end
    local expired = now - window
    if oldest <= expired then
      local count, from = min(FETCH, length, capacity - head), LOG_HEADER_BYTES + head * SLOT_BYTES
      local entries = call('GETRANGE', KEYS[key], from, from + count * SLOT_BYTES - 1)
      local at, last_expired = 1, base
      oldest, base, at = unpack_from(SLOT, entries, at)
      while oldest <= expired and at <= #entries do
        last_expired, head, length = base, head + 1, length - 1
        oldest, base, at = unpack_from(SLOT, entries, at)
      end
      if oldest <= expired then
        return false
      end
      base = last_expired
    end
    if length >= capacity then
      return false
    end
    stored_ttl[key], extra[key] = ttl_until, { base, oldest, head, length, capacity }
    return (total - base) % WRAP
  end

  write[SLIDING_LOG] = function(key, limit, level)
    local base, oldest, head, length, capacity = unpack(extra[key])
    local total = (base + level) % WRAP
    local ttl_until, millis = renewed_ttl(stored_ttl[key], limit.window, limit.window)
    call('SETRANGE', KEYS[key], LOG_HEADER_BYTES + (head + length) % capacity * SLOT_BYTES, pack(SLOT, now, total))
    call('SETRANGE', KEYS[key], '0',
      pack('<ddddddd', now, base, total, oldest, head, length + 1, ttl_until or stored_ttl[key]))
    if ttl_until then
      call('PEXPIRE', KEYS[key], millis)
    end
  end
end
