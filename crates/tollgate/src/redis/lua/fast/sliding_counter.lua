
-- sliding-counter: the level is the count of this window and what has not faded yet of the one before; `kept` is
-- the latter, before and after fading. See ../sliding_counter.lua.
if used[SLIDING_COUNTER] then
  read[SLIDING_COUNTER] = function(key, limit)
    local raw = strings[key]
    if not raw then
      kept[key] = { 0, 0 }
      return 0
    end
    local last, start, current, previous, window, ttl_until = unpack_from('<dddddd', raw)
    if window ~= limit.window or last > now then
      return false
    end
    ttl_of[key] = ttl_until
    local into = now % window
    if start ~= now - into then
      previous = start == now - into - window and current or 0
      current = 0
    end
    local parts = previous * (window - into)
    if parts >= SMALL then
      return false
    end
    local faded = parts + window - 1
    faded = (faded - faded % window) / window
    kept[key] = { previous, faded }
    return current + faded
  end

  write[SLIDING_COUNTER] = function(key, limit, level)
    local window, start = limit.window, now - now % limit.window
    local previous, faded = kept[key][1], kept[key][2]
    local ttl_until, millis = renewed_ttl(ttl_of[key] or 0, window, start + 2 * window - now)
    if ttl_until then
      call('SET', KEYS[key], pack('<dddddd', now, start, level - faded, previous, window, ttl_until), 'PX', millis)
    else
      call('SETRANGE', KEYS[key], '0', pack('<dddd', now, start, level - faded, previous))
    end
  end
end
