
-- token-bucket: a level of `whole + part / micros` units, draining at `units / micros`. Stored as '<dddddd'.
define[TOKEN_BUCKET] = function()
  local self = {}

  function self.load(raw)
    local state = { last = 0, whole = 0, part = 0, units = 1, micros = 1, ttl_until = 0, exists = false,
      at = 0, now_whole = 0, now_part = 0, now_units = 0, now_micros = 0, used = 0 }
    if not raw then
      return state
    elseif #raw ~= BUCKET_BYTES then
      return nil
    end
    local last, whole, part, units, micros, ttl_until = unpack_from('<dddddd', raw)
    state.last, state.whole, state.part, state.units, state.micros, state.ttl_until =
      last, whole, part, units, micros, ttl_until
    state.exists = true
    return are_stored(last, whole, units, micros, ttl_until) and units > 0 and part >= 0 and part < micros
      and part % 1 == 0 and state or nil
  end

  local function drain(whole, part, units, micros, elapsed)
    if elapsed == 0 then
      return whole, part
    end
    if elapsed * units / micros > whole + 8 then
      return 0, 0 -- all of it, regardless of rounding; below, the quotient stays in range
    end
    local gone, rest = multiply_divide(elapsed, units, micros)
    if rest > part then
      gone, part = gone + 1, part + micros
    end
    if gone > whole then
      return 0, 0
    end
    return whole - gone, part - rest
  end

  -- Returns a level in parts of another rate, rounded up.
  local function convert_to_rate(whole, part, micros, new_micros)
    if micros == new_micros then
      return whole, part
    end
    local new_part, rest = multiply_divide(part, new_micros, micros)
    if rest > 0 then
      new_part = new_part + 1
    end
    if new_part == new_micros then
      return whole + 1, 0
    end
    return whole, new_part
  end

  local function is_faster(limit, state)
    local h1, l1 = multiply(limit.units, state.micros)
    local h2, l2 = multiply(state.units, limit.micros)
    return h1 > h2 or (h1 == h2 and l1 > l2)
  end

  -- Drains at the faster of the old and the new rate.
  function self.view(state, limit)
    local at = effective_time(state.last, limit.window)
    local whole, part, units, micros = state.whole, state.part, state.units, state.micros
    if not at then
      at, whole, part, units, micros = now, 0, 0, limit.units, limit.micros
    else
      if (units ~= limit.units or micros ~= limit.micros) and is_faster(limit, state) then
        whole, part = convert_to_rate(whole, part, micros, limit.micros)
        units, micros = limit.units, limit.micros
      end
      whole, part = drain(whole, part, units, micros, at - state.last)
    end
    state.at, state.now_whole, state.now_part, state.now_units, state.now_micros = at, whole, part, units, micros
    state.used = whole + (part > 0 and 1 or 0)
  end

  -- Returns the microseconds until a level has drained, and the unused parts of the last one.
  local function drain_time(whole, part, units, micros)
    if whole * micros / units > MAX_EXACT then
      return MAX_EXACT, 0
    end
    local time, rest = multiply_divide(whole, micros, units)
    rest = rest + part
    local last = ceil(rest / units)
    if time + last > MAX_EXACT then
      return MAX_EXACT, 0
    end
    return time + last, last * units - rest
  end

  function self.charge(state, limit, units)
    local whole, part = convert_to_rate(state.now_whole, state.now_part, state.now_micros, limit.micros)
    whole = whole + min(units, MAX_EXACT - state.used)
    state.last, state.whole, state.part, state.units, state.micros =
      state.at, whole, part, limit.units, limit.micros
    state.now_whole, state.now_part, state.now_units, state.now_micros = whole, part, limit.units, limit.micros
    state.used = whole + (part > 0 and 1 or 0)
  end

  function self.wait(state, _, max_used)
    local time = drain_time(state.now_whole - max_used, state.now_part, state.now_units, state.now_micros)
    return min(state.at - now + time, MAX_EXACT)
  end

  function self.reset(state)
    if state.used == 0 then
      return 0, 0
    end
    local time, spare = drain_time(state.now_whole, state.now_part, state.now_units, state.now_micros)
    return min(state.at - now + time, MAX_EXACT), spare
  end

  function self.refund(state, limit, units, time)
    local at, refund_part = state.at, 0
    if time >= 0 then
      local made_under = limit.made_under
      local is_same_rate = made_under and made_under.units == state.now_units and made_under.micros == state.now_micros
      -- at a faster rate than now, more of it may have drained
      if time > at or (not is_same_rate and at - time >= limit.window) then
        return false
      end
      -- what is left of that charge if it was the only one: at least as much of it still counts
      units, refund_part = drain(units, 0, state.now_units, state.now_micros, at - time)
    end
    if state.used == 0 or (units == 0 and refund_part == 0) then
      return false
    end
    local whole, part = state.now_whole - units, state.now_part - refund_part
    if part < 0 then
      whole, part = whole - 1, part + state.now_micros
    end
    if whole < 0 then
      whole, part = 0, 0
    end
    state.last, state.whole, state.part = at, whole, part
    state.units, state.micros = state.now_units, state.now_micros
    self.view(state, limit)
    return true
  end

  function self.own_limit(state, limit)
    return limit.window, 0, state.units, state.micros
  end

  function self.save(key, state, limit)
    local expires = state.last + drain_time(state.whole, state.part, state.units, state.micros)
    local ttl = next_ttl(state, limit, expires)
    save_string(key, pack('<dddddd', state.last, state.whole, state.part, state.units, state.micros,
      state.ttl_until), ttl)
  end

  return self
end
