
-- sliding-counter: the level is the count of the current window plus the faded count of the previous one; `extra` holds the count
-- of the previous window before and after fading. See ../sliding_counter.lua.
local SLIDING_COUNTER, SLIDING_COUNTER_BYTES = 2, 48

if is_used[SLIDING_COUNTER] then
  read[SLIDING_COUNTER] = function(key, limit)
    local raw = stored[key]
    if not raw then
      extra[key] = { 0, 0 }
      return 0
    elseif #raw ~= SLIDING_COUNTER_BYTES then
      return false
    end
    local last, start, current, previous, window, ttl_until = unpack_from('<dddddd', raw)
    if not (window == limit.window and last <= now and start >= 0 and start <= last and current >= 0
      and current <= MAX_STORED and previous >= 0 and previous <= MAX_STORED and ttl_until >= 0
      and ttl_until <= MAX_TTL_END and (last + ttl_until) % 1 == 0 and start % window == 0 and (current + previous) % 1 == 0) then
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
