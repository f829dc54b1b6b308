
-- sliding-log: the level is what the entries that count add up to; `kept` is its header. One that has to grow, or
-- of which more than a few entries have expired, takes the general path. See ../sliding_log.lua.
local LOG_HEADER, LOG_HEADER_BYTES, LOG_HEADER_END = '<dddddddddd', 80, '79'

if used[SLIDING_LOG] then
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
    local gone = now - window
    if oldest <= gone then
      local count, from = min(FETCH, length, capacity - head), LOG_HEADER_BYTES + head * SLOT_BYTES
      local entries = call('GETRANGE', KEYS[key], from, from + count * SLOT_BYTES - 1)
      local at, last_gone = 1, base
      oldest, base, at = unpack_from(SLOT, entries, at)
      while oldest <= gone and at <= #entries do
        last_gone, head, length = base, head + 1, length - 1
        oldest, base, at = unpack_from(SLOT, entries, at)
      end
      if oldest <= gone then
        return false
      end
      base = last_gone
    end
    if length >= capacity then
      return false
    end
    ttl_of[key], kept[key] = ttl_until, { base, oldest, head, length, capacity }
    return (total - base) % WRAP
  end

  write[SLIDING_LOG] = function(key, limit, level)
    local base, oldest, head, length, capacity = unpack(kept[key])
    local total = (base + level) % WRAP
    local ttl_until, millis = renewed_ttl(ttl_of[key], limit.window, limit.window)
    call('SETRANGE', KEYS[key], LOG_HEADER_BYTES + (head + length) % capacity * SLOT_BYTES, pack(SLOT, now, total))
    call('SETRANGE', KEYS[key], '0',
      pack('<ddddddd', now, base, total, oldest, head, length + 1, ttl_until or ttl_of[key]))
    if ttl_until then
      call('PEXPIRE', KEYS[key], millis)
    end
  end
end
