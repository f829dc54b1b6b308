
-- fixed-window: the level is the count. See ../fixed_window.lua.
local FIXED_WINDOW = 1

if is_used[FIXED_WINDOW] then
  local function window_end(limit)
    local window = limit.window
    return now + window - (now + window - limit.phase) % window
  end

  read[FIXED_WINDOW] = function(key, limit)
    local raw = fixed_states[key]
    if not raw then
      return 0
    end
    local last, ends, count, window, ttl_until = unpack_from('<ddddd', raw)
    if window ~= limit.window or last > now then
      return false
    end
    stored_ttl[key] = ttl_until
    if ends == window_end(limit) then
      return count
    end
    return ends <= now and 0
  end

  write[FIXED_WINDOW] = function(key, limit, level)
    local ends = window_end(limit)
    local ttl_until, millis = renewed_ttl(stored_ttl[key] or 0, limit.window, ends - now)
    if ttl_until then
      call('SET', KEYS[key], pack('<ddddd', now, ends, level, limit.window, ttl_until), 'PX', millis)
    else
      call('SETRANGE', KEYS[key], '0', pack('<ddd', now, ends, level))
    end
  end
end
