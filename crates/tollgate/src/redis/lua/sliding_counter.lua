
-- sliding-counter: the count of the window under way and of the one before. State '<dddddd'.
local sliding_counter = {}

function sliding_counter.load(raw)
  local state = { last = 0, start = 0, current = 0, previous = 0, window = 0, ttl_until = 0 }
  if raw then
    state.exists = true
    state.last, state.start, state.current, state.previous, state.window, state.ttl_until =
      unpack_from('<dddddd', raw)
  end
  return state
end

-- Both counters rolled forward, in the window they were written under; `cut` is when all of it stops
-- counting because the limit has another window now.
local function sliding_counter_view(state, limit)
  local window = limit.window
  local at = key_time(state.last, window)
  local cut = state.window ~= window and state.last + window
  if not at or state.window == 0 or (cut and at >= cut) then
    at = at or now
    return at, at - at % window, window, 0, 0, nil
  end
  window = state.window
  local start = at - at % window
  if start == state.start then
    return at, start, window, state.current, state.previous, cut
  elseif start == state.start + window then
    return at, start, window, 0, state.current, cut
  end
  return at, start, window, 0, 0, cut
end

local function sliding_counter_used(at, start, window, current, previous)
  local whole, part = multiply_divide(previous, start + window - at, window)
  return current + whole + (part > 0 and 1 or 0)
end

function sliding_counter.used(state, limit)
  return sliding_counter_used(sliding_counter_view(state, limit))
end

function sliding_counter.wait(state, limit, room)
  local at, start, window, current, previous, cut = sliding_counter_view(state, limit)
  if current <= room then
    return before_cut(start + window - multiply_divide(room - current, window, previous), cut)
  end
  return before_cut(start + 2 * window - multiply_divide(room, window, current), cut)
end

function sliding_counter.reset(state, limit)
  local _, start, window, current, previous, cut = sliding_counter_view(state, limit)
  if current > 0 then
    return before_cut(start + 2 * window, cut), 0
  elseif previous > 0 then
    return before_cut(start + window, cut), 0
  end
  return 0, 0
end

function sliding_counter.charge(state, limit, units)
  local at, start, window, current, previous, cut = sliding_counter_view(state, limit)
  local used = sliding_counter_used(at, start, window, current, previous)
  if cut then
    window = limit.window
    start, current, previous = at - at % window, used, 0
  end
  state.last, state.start, state.window, state.previous = at, start, window, previous
  state.current = current + min(units, MAX_EXACT - used)
end

function sliding_counter.refund(state, limit, units, time)
  local _, start, window, current, previous = sliding_counter_view(state, limit)
  local from_current, from_previous = 0, 0
  if time < 0 or (time >= start and time < start + window) then
    from_current = min(units, current)
  end
  if time < 0 or (time >= start - window and time < start) then
    from_previous = min(units - from_current, previous)
  end
  if start == state.start then
    state.current = state.current - from_current
    state.previous = state.previous - from_previous
  else
    state.current = state.current - from_previous
  end
  return from_current + from_previous > 0
end

function sliding_counter.save(key, state, limit)
  local ttl = next_ttl(state, limit, state.start + 2 * state.window)
  save_string(key, pack('<dddddd', state.last, state.start, state.current, state.previous, state.window,
    state.ttl_until), ttl)
end
