
-- token-bucket: a level of `whole + part / micros` units, draining at `units / micros`. State '<dddddd'.
local token_bucket = {}

function token_bucket.load(raw)
  local state = { last = 0, whole = 0, part = 0, units = 1, micros = 1, ttl_until = 0 }
  if raw then
    state.exists = true
    state.last, state.whole, state.part, state.units, state.micros, state.ttl_until = unpack_from('<dddddd', raw)
  end
  return state
end

local function drained(whole, part, units, micros, elapsed)
  if whole == 0 and part == 0 then
    return 0, 0
  end
  if elapsed * units / micros > whole + 8 then
    return 0, 0 -- surely all of it, rounding aside; below, the quotient stays in range
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

-- The part of a level in parts of another rate, the last one rounded up.
local function at_rate(whole, part, micros, new_micros)
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

local function is_faster(units, micros, than_units, than_micros)
  local h1, l1 = multiply(units, than_micros)
  local h2, l2 = multiply(than_units, micros)
  return h1 > h2 or (h1 == h2 and l1 > l2)
end

-- The key's own time and the level then, draining at the faster of the old rate and the new.
local function token_bucket_view(state, limit)
  local at = key_time(state.last, limit.window)
  if not at then
    return now, 0, 0, limit.units, limit.micros
  end
  local whole, part, units, micros = state.whole, state.part, state.units, state.micros
  if (units ~= limit.units or micros ~= limit.micros) and is_faster(limit.units, limit.micros, units, micros) then
    whole, part = at_rate(whole, part, micros, limit.micros)
    units, micros = limit.units, limit.micros
  end
  whole, part = drained(whole, part, units, micros, at - state.last)
  return at, whole, part, units, micros
end

-- Microseconds until a level has drained, and how many parts of the last one are left over.
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

function token_bucket.used(state, limit)
  local _, whole, part = token_bucket_view(state, limit)
  return whole + (part > 0 and 1 or 0)
end

function token_bucket.wait(state, limit, room)
  local at, whole, part, units, micros = token_bucket_view(state, limit)
  return min(at - now + drain_time(whole - room, part, units, micros), MAX_EXACT)
end

function token_bucket.reset(state, limit)
  local at, whole, part, units, micros = token_bucket_view(state, limit)
  if whole == 0 and part == 0 then
    return 0, 0
  end
  local time, spare = drain_time(whole, part, units, micros)
  return min(at - now + time, MAX_EXACT), spare
end

function token_bucket.charge(state, limit, add)
  local at, whole, part, _, micros = token_bucket_view(state, limit)
  whole, part = at_rate(whole, part, micros, limit.micros)
  state.last, state.units, state.micros, state.part = at, limit.units, limit.micros, part
  state.whole = whole + min(add, MAX_EXACT - whole - (part > 0 and 1 or 0))
end

function token_bucket.refund(state, limit, back, time)
  local at, whole, part, units, micros = token_bucket_view(state, limit)
  if time >= 0 and (time > at or at - time >= limit.window) then
    return false
  end
  if back == 0 or (whole == 0 and part == 0) then
    return false
  end
  if whole >= back then
    whole = whole - back
  else
    whole, part = 0, 0
  end
  state.last, state.whole, state.part, state.units, state.micros = at, whole, part, units, micros
  return true
end

function token_bucket.save(key, state, limit)
  local expires = state.last + drain_time(state.whole, state.part, state.units, state.micros)
  local ttl = next_ttl(state, limit, expires)
  save_string(key, pack('<dddddd', state.last, state.whole, state.part, state.units, state.micros, state.ttl_until), ttl)
end
