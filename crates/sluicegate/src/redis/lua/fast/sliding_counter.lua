
-- sliding-counter: the level is the count of the current window plus the faded count of the previous one; `extra` holds the count
-- of the previous window before and after fading. See ../sliding_counter.lua.
local SLIDING_COUNTER = 2

if is_used[SLIDING_COUNTER] then
  read[SLIDING_COUNTER] = function(key, limit)
    local raw = fixed_states[key]
    if not raw then
      extra[key] = { 0, 0 }
      return 0
    end
    local last, start, current, previous, window, ttl_until = unpack_from('<dddddd', raw)
    if window ~= limit.window or last > now then
      return false
    end
    stored_ttl[key] = ttl_until
    local into = now % window
    if start ~= now - into then
      previous = start == now - into - window and current or 0
      current = 0
    end
    local parts = previous * (window - into)
    if parts >= MAX_FAST then
      return false
    end
    local faded = parts + window - 1
    faded = (faded - faded % window) / window
    extra[key] = { previous, faded }
    return current + faded
  end

  write[SLIDING_COUNTER] = function(key, limit, level)
    local window, start = limit.window, now - now % limit.window
    local previous, faded = extra[key][1], extra[key][2]
    local ttl_until, millis = renewed_ttl(stored_ttl[key] or 0, window, start + 2 * window - now)
    if ttl_until then
      call('SET', KEYS[key], pack('<dddddd', now, start, level - faded, previous, window, ttl_until), 'PX', millis)
    else
      call('SETRANGE', KEYS[key], '0', pack('<dddd', now, start, level - faded, previous))
    end
  end
end
