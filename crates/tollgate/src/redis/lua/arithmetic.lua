
-- Every call defines the script's functions anew, so each algorithm is a function that defines itself when the
-- batch needs it. It answers with its operations on a state:
--   load(raw, key)             the state that is stored, or that of an unused counter
--   view(state, limit)         takes the state to the present: `state.used` is what counts now; the operations
--                              below rely on it
--   charge(state, limit, n)    counts n more
--   wait(state, limit, room)   until at most `room` units count
--   reset(state, limit)        until nothing counts, and the surplus
--   refund(state, limit, n, t) takes back up to n; whether it did
--   save(key, state, limit)    writes it

local MAX_EXACT = 2 ^ 53 - 1

-- a * b as high * 2^52 + low
local function multiply(a, b)
  local HALF, LIMB = 2 ^ 26, 2 ^ 52
  local a1, b1 = floor(a / HALF), floor(b / HALF)
  local a0, b0 = a - a1 * HALF, b - b1 * HALF
  local cross1, cross2 = a1 * b0, a0 * b1
  local carry1, carry2 = floor(cross1 / HALF), floor(cross2 / HALF)
  local middle = (cross1 - carry1 * HALF) + (cross2 - carry2 * HALF)
  local carry3 = floor(middle / HALF)
  local low = a0 * b0 + (middle - carry3 * HALF) * HALF
  local carry4 = floor(low / LIMB)
  return a1 * b1 + carry1 + carry2 + carry3 + carry4, low - carry4 * LIMB
end

-- floor(a * b / divisor) and the remainder. The quotient may pass 2^53 by a few at most; then it is 2^53.
local function multiply_divide(a, b, divisor)
  local product = a * b
  local quotient = floor(product / divisor)
  if product < 2 ^ 52 then
    return quotient, product - quotient * divisor
  end
  -- the estimate is off by a few where it is large: correct it by the exact products
  quotient = min(quotient, MAX_EXACT)
  local high, low = multiply(a, b)
  local h, l = multiply(quotient, divisor)
  while h > high or (h == high and l > low) do
    quotient = quotient - 1
    h, l = multiply(quotient, divisor)
  end
  local remainder = (high - h) * 2 ^ 52 + (low - l)
  while remainder >= divisor do
    quotient = quotient + 1
    remainder = remainder - divisor
  end
  return quotient, remainder
end

-- The moment at which a state dated `last` is read; nil when it is dated more than a window ahead.
local function key_time(last, window)
  if last > now + window then
    return nil
  end
  return max(last, now)
end

-- The wait until `moment`, or until `cut` if everything stops counting there because the window changed.
local function before_cut(moment, cut)
  return (cut and min(cut, moment) or moment) - now
end

-- The TTL that the key of a changed state needs, in milliseconds: at least until nothing counts. nil when
-- the one it has will do.
local function next_ttl(state, limit, expires)
  local ttl_until, millis = renewed_ttl(state.exists and state.ttl_until or 0, limit.window, expires - now)
  state.ttl_until = ttl_until or state.ttl_until
  return millis
end

-- Writes the state of a counter that is one small string of fixed length.
local function save_string(key, packed, ttl)
  if ttl then
    call('SET', key, packed, 'PX', ttl)
  else
    call('SETRANGE', key, '0', packed)
  end
end
