
-- sliding-counter: the counts of the current and of the previous window. Stored as '<dddddd'.
define[SLIDING_COUNTER] = function()
  local self = {}

  function self.load(raw)
    local state = { last = 0, start = 0, current = 0, previous = 0, window = 0, ttl_until = 0, exists = false,
      at = 0, from = 0, length = 0, now_current = 0, now_previous = 0, cutoff = false, used = 0 }
    if not raw then
      return state
    elseif #raw ~= SLIDING_COUNTER_BYTES then
      return nil
    end
    local last, start, current, previous, window, ttl_until = unpack_from('<dddddd', raw)
    state.last, state.start, state.current, state.previous, state.window, state.ttl_until =
      last, start, current, previous, window, ttl_until
    state.exists = true
    return are_stored(last, current, previous, window, ttl_until) and window > 0 and start >= 0 and start <= last
      and start % window == 0 and state or nil
  end

  -- Advances both counters, in the window that they were written under. All units stop counting at `cutoff`, because the limit
  -- has another window now.
  function self.view(state, limit)
    local window = limit.window
    local at = effective_time(state.last, window)
    local cutoff = state.window ~= window and state.last + window
    local current, previous = 0, 0
    if not at or state.window == 0 or (cutoff and at >= cutoff) then
      at, cutoff = at or now, false
    else
      window = state.window
    end
    local from = at - at % window
    if window == state.window then
      if from == state.start then
        current, previous = state.current, state.previous
      elseif from == state.start + window then
        previous = state.current
      end
    end
    local whole, part = multiply_divide(previous, from + window - at, window)
    state.at, state.from, state.length, state.cutoff = at, from, window, cutoff
    state.now_current, state.now_previous = current, previous
    state.used = current + whole + (part > 0 and 1 or 0)
  end

  function self.charge(state, limit, units)
    local added = min(units, MAX_EXACT - state.used)
    if state.cutoff then
      local window = limit.window
      state.from, state.length, state.cutoff = state.at - state.at % window, window, false
      state.now_current, state.now_previous = state.used, 0
    end
    state.used, state.now_current = state.used + added, state.now_current + added
    state.last, state.start, state.window = state.at, state.from, state.length
    state.current, state.previous = state.now_current, state.now_previous
  end

  function self.wait(state, _, max_used)
    local window = state.length
    if state.now_current <= max_used then
      local faded = multiply_divide(max_used - state.now_current, window, state.now_previous)
      return wait_until(state.from + window - faded, state.cutoff)
    end
    local faded = multiply_divide(max_used, window, state.now_current)
    return wait_until(state.from + 2 * window - faded, state.cutoff)
  end

  function self.reset(state)
    if state.now_current > 0 then
      return wait_until(state.from + 2 * state.length, state.cutoff), 0
    elseif state.now_previous > 0 then
      return wait_until(state.from + state.length, state.cutoff), 0
    end
    return 0, 0
  end

  function self.refund(state, limit, units, time)
    local from, window = state.from, state.length
    local from_current, from_previous = 0, 0
    if time < 0 or (time >= from and time < from + window) then
      from_current = min(units, state.now_current)
    end
    if time < 0 or (time >= from - window and time < from) then
      from_previous = min(units - from_current, state.now_previous)
    end
    if from == state.start then
      state.current = state.current - from_current
      state.previous = state.previous - from_previous
    else
      state.current = state.current - from_previous
    end
    self.view(state, limit)
    return from_current + from_previous > 0
  end

  function self.own_limit(state, limit)
    local window = state.window > 0 and state.window or limit.window
    return window, 0, limit.units, limit.micros
  end

  function self.save(key, state, limit)
    local ttl = next_ttl(state, limit, state.start + 2 * state.window)
    save_string(key, pack('<dddddd', state.last, state.start, state.current, state.previous, state.window,
      state.ttl_until), ttl)
  end

  return self
end
