
-- sliding-log: the level is the sum of the entries that count; `extra` is its header. A log that has to grow, or that
-- has many expired entries, takes the general path. See ../sliding_log.lua.
local SLIDING_LOG = 4

if is_used[SLIDING_LOG] then
  local FETCH = 8

  read[SLIDING_LOG] = function(key, limit)
    local raw = stored[key]
    if not raw or #raw ~= LOG_HEADER_BYTES then
      return false
    end
    local last, base, total, oldest, head, length, ttl_until, window, capacity = unpack_from(LOG_HEADER, raw)
    if not (window == limit.window and last < now and last >= oldest and oldest >= 0 and length > 0
      and length <= capacity and capacity < MAX_LOG_SLOTS and head >= 0 and head < capacity and base >= 0
      and base < LOG_WRAP and total >= 0 and total < LOG_WRAP and ttl_until >= 0 and ttl_until <= MAX_TTL_END
      and (last + ttl_until) % 1 == 0 and oldest % 1 == 0 and (head + length + capacity + base + total) % 1 == 0) then
      return false
    end
    local expired = now - window
    if oldest <= expired then
      local count, from = min(FETCH, length, capacity - head), LOG_HEADER_BYTES + head * SLOT_BYTES
      local entries = call('GETRANGE', KEYS[key], from, from + count * SLOT_BYTES - 1)
      if #entries ~= count * SLOT_BYTES then
        return false
      end
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
    return (total - base) % LOG_WRAP
  end

  write[SLIDING_LOG] = function(key, limit, level)
    local base, oldest, head, length, capacity = unpack(extra[key])
    local total = (base + level) % LOG_WRAP
    local ttl_until, millis = renewed_ttl(stored_ttl[key], limit.window, limit.window)
    call('SETRANGE', KEYS[key], LOG_HEADER_BYTES + (head + length) % capacity * SLOT_BYTES, pack(SLOT, now, total))
    call('SETRANGE', KEYS[key], '0',
      pack('<ddddddd', now, base, total, oldest, head % capacity, length + 1, ttl_until or stored_ttl[key]))
    if ttl_until then
      call('PEXPIRE', KEYS[key], millis)
    end
  end
end
