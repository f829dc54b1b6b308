
-- fixed-window: one counter and the window it belongs to. State '<ddddd'.
local fixed_window = {}

function fixed_window.load(raw)
  local state = { last = 0, ends = 0, used = 0, window = 0, ttl_until = 0 }
  if raw then
    state.exists = true
    state.last, state.ends, state.used, state.window, state.ttl_until = unpack_from('<ddddd', raw)
  end
  return state
end

local function window_end(limit, at)
  local window = limit.window
  return at + window - (at + window - limit.phase) % window
end

local function fixed_window_view(state, limit)
  local at = key_time(state.last, limit.window)
  if not at then
    return now, window_end(limit, now), 0, 0
  end
  local ends = window_end(limit, at)
  local till = ends
  if state.window ~= limit.window or state.ends ~= ends then
    till = min(state.ends, state.last + limit.window)
  end
  return at, ends, at < till and state.used or 0, till
end

function fixed_window.used(state, limit)
  local _, _, used = fixed_window_view(state, limit)
  return used
end

function fixed_window.wait(state, limit)
  local _, _, _, till = fixed_window_view(state, limit)
  return till - now
end

function fixed_window.reset(state, limit)
  local _, _, used, till = fixed_window_view(state, limit)
  return used > 0 and till - now or 0, 0
end

function fixed_window.charge(state, limit, units)
  local at, ends, used = fixed_window_view(state, limit)
  state.last, state.ends, state.window = at, ends, limit.window
  state.used = used + min(units, MAX_EXACT - used)
end

function fixed_window.refund(state, limit, units, time)
  if time >= 0 and (time < state.ends - state.window or time >= state.ends) then
    return false
  end
  local back = min(units, fixed_window.used(state, limit))
  state.used = state.used - back
  return back > 0
end

function fixed_window.save(key, state, limit)
  local ttl = next_ttl(state, limit, state.ends)
  save_string(key, pack('<ddddd', state.last, state.ends, state.used, state.window, state.ttl_until), ttl)
end
