
-- fixed-window: one counter, and until when it counts. Stored as '<ddddd'. The windows have equal lengths, or are the periods of a
-- calendar, of which the limit has the two around the present.
--
-- A late correction of a hold may not have the present period (`is_period_unknown`, hold.lua). It stores the end `last + 1`. The next check
-- has the true end of the period of `last` and counts the units until then. Until that check, further corrections without a period add to
-- them. Corrections in two periods without a check between them all count in the second one.
define[FIXED_WINDOW] = function()
  local self = {}

  function self.load(raw)
    local state = { last = 0, ends = 0, count = 0, window = 0, ttl_until = 0, exists = false,
      at = 0, next_end = 0, counts_until = 0, used = 0 }
    if not raw then
      return state
    elseif #raw ~= FIXED_WINDOW_BYTES then
      return nil
    end
    local last, ends, count, window, ttl_until = unpack_from('<ddddd', raw)
    state.last, state.ends, state.count, state.window, state.ttl_until = last, ends, count, window, ttl_until
    state.exists = true
    return are_stored(last, ends, count, window, ttl_until) and window > 0 and state or nil
  end

  -- Returns the time at which a state is read; nil if it is dated too far ahead.
  local function time_of(state, limit)
    if limit.ends then
      return state.last < limit.next_end and max(state.last, now) or nil
    end
    return effective_time(state.last, limit.window)
  end

  -- Returns the end of the window that contains `at`. Of a period before the two, any time until they start.
  local function window_end(limit, at)
    if limit.is_period_unknown then
      return at + 1
    elseif limit.ends then
      return at < limit.start and limit.start or at < limit.ends and limit.ends or limit.next_end
    end
    local window = limit.window
    return at + window - (at + window - limit.phase) % window
  end

  -- Returns whether a correction without a period has written the state, or a check in the last microsecond of a period.
  local function has_unknown_end(state)
    return state.ends == state.last + 1
  end

  -- Returns how long the units count under a limit whose window differs from the one that they were charged under.
  local function counts_until(state, limit)
    local own_end = min(state.ends, state.last + limit.window)
    return max(own_end, min(window_end(limit, state.last), state.last + state.window))
  end

  function self.view(state, limit)
    local at = time_of(state, limit)
    if not at then
      state.at, state.next_end, state.counts_until, state.used = now, window_end(limit, now), 0, 0
      return
    end
    local ends = window_end(limit, at)
    local is_own = state.window == limit.window
      and (state.ends == ends or (limit.is_period_unknown and has_unknown_end(state) and at < state.last + limit.window))
    local counted = is_own and ends or counts_until(state, limit)
    state.at, state.next_end, state.counts_until, state.used = at, ends, counted, at < counted and state.count or 0
  end

  function self.charge(state, limit, units)
    -- units that were carried over from another window keep their end
    local ends = state.used > 0 and max(state.next_end, state.counts_until) or state.next_end
    local used = state.used + min(units, MAX_EXACT - state.used)
    state.last, state.ends, state.window, state.count = state.at, ends, limit.window, used
    state.counts_until, state.used = ends, used
  end

  function self.wait(state)
    return state.counts_until - now
  end

  function self.reset(state)
    return state.used > 0 and state.counts_until - now or 0, 0
  end

  function self.refund(state, limit, units, time)
    local starts = state.ends - state.window
    if limit.ends then -- its window is only an upper bound of a period
      starts = max(starts, state.at < limit.ends and limit.start or limit.ends)
    end
    if time >= 0 and (time < starts or time >= state.ends) then
      return false
    end
    local refunded = min(units, state.used)
    state.count, state.used = state.count - refunded, state.used - refunded
    return refunded > 0
  end

  function self.own_limit(state, limit)
    local window = state.window > 0 and state.window or limit.window
    return window, state.ends % window, limit.units, limit.micros
  end

  function self.save(key, state, limit)
    -- under another limit, the units may count beyond the end of their own window
    local ttl = next_ttl(state, limit, state.last + state.window)
    save_string(key, pack('<ddddd', state.last, state.ends, state.count, state.window, state.ttl_until), ttl)
  end

  return self
end

define[CALENDAR_WINDOW] = define[FIXED_WINDOW]
