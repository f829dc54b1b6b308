
-- fixed-window: one counter and the window it belongs to. Stored as '<ddddd'.
local function fixed_window()
  local self = {}

  function self.load(raw)
    local state = { last = 0, ends = 0, count = 0, window = 0, ttl_until = 0, exists = false,
      at = 0, next_end = 0, till = 0, used = 0 }
    if raw then
      state.exists = true
      state.last, state.ends, state.count, state.window, state.ttl_until = unpack_from('<ddddd', raw)
    end
    return state
  end

  local function window_end(limit, at)
    local window = limit.window
    return at + window - (at + window - limit.phase) % window
  end

  function self.view(state, limit)
    local at = key_time(state.last, limit.window)
    if not at then
      state.at, state.next_end, state.till, state.used = now, window_end(limit, now), 0, 0
      return
    end
    local ends = window_end(limit, at)
    local till = ends
    if state.window ~= limit.window or state.ends ~= ends then
      till = min(state.ends, state.last + limit.window)
    end
    state.at, state.next_end, state.till, state.used = at, ends, till, at < till and state.count or 0
  end

  function self.charge(state, limit, units)
    local used = state.used + min(units, MAX_EXACT - state.used)
    state.last, state.ends, state.window, state.count = state.at, state.next_end, limit.window, used
    state.till, state.used = state.next_end, used
  end

  function self.wait(state)
    return state.till - now
  end

  function self.reset(state)
    return state.used > 0 and state.till - now or 0, 0
  end

  function self.refund(state, _, units, time)
    if time >= 0 and (time < state.ends - state.window or time >= state.ends) then
      return false
    end
    local back = min(units, state.used)
    state.count, state.used = state.count - back, state.used - back
    return back > 0
  end

  function self.save(key, state, limit)
    local ttl = next_ttl(state, limit, state.ends)
    save_string(key, pack('<ddddd', state.last, state.ends, state.count, state.window, state.ttl_until), ttl)
  end

  return self
end
