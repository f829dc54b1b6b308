
-- fixed-window: one counter and its window. Stored as '<ddddd'.
define[FIXED_WINDOW] = function()
  local self = {}

  function self.load(raw)
    local state = { last = 0, ends = 0, count = 0, window = 0, ttl_until = 0, exists = false,
      at = 0, next_end = 0, counts_until = 0, used = 0 }
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
    local at = effective_time(state.last, limit.window)
    if not at then
      state.at, state.next_end, state.counts_until, state.used = now, window_end(limit, now), 0, 0
      return
    end
    local ends = window_end(limit, at)
    local counts_until = ends
    if state.window ~= limit.window or state.ends ~= ends then
      counts_until = min(state.ends, state.last + limit.window)
    end
    state.at, state.next_end, state.counts_until, state.used = at, ends, counts_until, at < counts_until and state.count or 0
  end

  function self.charge(state, limit, units)
    local used = state.used + min(units, MAX_EXACT - state.used)
    state.last, state.ends, state.window, state.count = state.at, state.next_end, limit.window, used
    state.counts_until, state.used = state.next_end, used
  end

  function self.wait(state)
    return state.counts_until - now
  end

  function self.reset(state)
    return state.used > 0 and state.counts_until - now or 0, 0
  end

  function self.refund(state, _, units, time)
    if time >= 0 and (time < state.ends - state.window or time >= state.ends) then
      return false
    end
    local refunded = min(units, state.used)
    state.count, state.used = state.count - refunded, state.used - refunded
    return refunded > 0
  end

  function self.save(key, state, limit)
    local ttl = next_ttl(state, limit, state.ends)
    save_string(key, pack('<ddddd', state.last, state.ends, state.count, state.window, state.ttl_until), ttl)
  end

  return self
end
