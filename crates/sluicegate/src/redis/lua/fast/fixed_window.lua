
-- fixed-window: the level is the count; `extra` is the level if only refunds have changed it, which keep the time of the last charge. See ../fixed_window.lua.
local FIXED_WINDOW, FIXED_WINDOW_BYTES = 1, 40

local function window_end(limit)
  local window = limit.window
  return now + window - (now + window - limit.phase) % window
end

if is_used[FIXED_WINDOW] then
  read[FIXED_WINDOW] = function(key, limit)
    local raw = stored[key]
    if not raw then
      return 0
    elseif #raw ~= FIXED_WINDOW_BYTES then
      return false
    end
    local last, ends, count, window, ttl_until = unpack_from('<ddddd', raw)
    if not (window == limit.window and last <= now and last >= 0 and ends >= 0 and ends <= MAX_STORED and count >= 0
      and count <= MAX_STORED and ttl_until >= 0 and ttl_until <= MAX_TTL_END
      and (last + ttl_until) % 1 == 0 and (ends + count) % 1 == 0) then
      return false
    end
    stored_ttl[key] = ttl_until
    local current_end = window_end(limit)
    if ends == current_end then
      return count
    end
    return ends <= now and last < current_end - window and 0
  end

  write[FIXED_WINDOW] = function(key, limit, level)
    local ends, last = window_end(limit), extra[key] == level and unpack_from('<d', stored[key]) or now
    local ttl_until, millis = renewed_ttl(stored_ttl[key] or 0, limit.window, limit.window)
    if ttl_until then
      call('SET', KEYS[key], pack('<ddddd', last, ends, level, limit.window, ttl_until), 'PX', millis)
    else
      call('SETRANGE', KEYS[key], '0', pack('<ddd', last, ends, level))
    end
  end
end
