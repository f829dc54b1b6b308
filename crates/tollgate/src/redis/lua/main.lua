
-- The decision: ask every tier of a check how many requests would pass, then charge all tiers or none.
local ALGORITHMS = { fixed_window, sliding_counter, token_bucket, sliding_log }
local CHECK, PEEK, CHARGE, REFUND = 0, 1, 2, 3
local SHADOW, OVERDRAFT, MORE = 1, 2, 4

local limits, position = {}, 1
while position <= #ARGV[2] do
  local limit, algorithm = {}
  algorithm, limit.amount, limit.window, limit.capacity, limit.phase, limit.units, limit.micros, position =
    unpack_from('<Bdddddd', ARGV[2], position)
  limit.algorithm = ALGORITHMS[algorithm]
  limits[#limits + 1] = limit
end

local strings = {}
if plain_keys > 0 then
  strings = redis.call('MGET', unpack(KEYS, 1, plain_keys))
end

-- What is known of each key so far, and under which limit it was last changed.
local states, written_under = {}, {}

local function state_of(index, limit)
  local state = states[index]
  if not state then
    local raw = strings[index]
    if index > plain_keys then
      raw = redis.call('GETRANGE', KEYS[index], 0, LOG_HEADER_BYTES - 1)
      raw = raw ~= '' and raw
    end
    state = limit.algorithm.load(raw, KEYS[index])
    states[index] = state
  end
  return state
end

local function must_be_free(tier)
  return tier.overdraft and min(tier.cost, 1) or tier.cost
end

local function passes(tier, count)
  local free = tier.limit.capacity - tier.limit.algorithm.used(tier.state, tier.limit)
  if free < must_be_free(tier) then
    return 0
  elseif tier.cost == 0 then
    return count
  elseif tier.overdraft then
    return min(ceil(free / tier.cost), count)
  end
  return min(floor(free / tier.cost), count)
end

local function retry(tier)
  local room = tier.limit.capacity - must_be_free(tier)
  if room < 0 then
    return -1
  end
  return tier.limit.algorithm.wait(tier.state, tier.limit, room)
end

local function answer(tier, passed, charged, wait)
  local algorithm, limit, state = tier.limit.algorithm, tier.limit, tier.state
  local free = limit.capacity - algorithm.used(state, limit)
  local reset, spare = algorithm.reset(state, limit)
  return pack('<I4I4dddd', passed, charged, free, wait, reset, spare)
end

local function charge(tier, units)
  if units > 0 then
    tier.limit.algorithm.charge(tier.state, tier.limit, units)
    written_under[tier.key] = tier.limit
  end
end

local function refund(tier, units)
  if tier.limit.algorithm.refund(tier.state, tier.limit, units, tier.time) then
    written_under[tier.key] = tier.limit
  end
end

local replies = { pack('<Bd', 0, now) }

local function decide(operation, tiers, count)
  local granted = operation == CHECK and count or 0
  for _, tier in ipairs(tiers) do
    tier.passes = passes(tier, count)
    if not tier.shadow then
      granted = min(granted, tier.passes)
    end
  end
  for _, tier in ipairs(tiers) do
    local charged = min(granted, tier.passes)
    charge(tier, charged * tier.cost)
    local refuses_next = tier.passes < count and charged == tier.passes
    replies[#replies + 1] = answer(tier, tier.passes, charged, refuses_next and retry(tier) or 0)
  end
end

local function adjust(operation, tiers, count)
  for _, tier in ipairs(tiers) do
    local units = min(count * tier.cost, MAX_EXACT)
    if operation == CHARGE then
      charge(tier, units)
    else
      refund(tier, units)
    end
    replies[#replies + 1] = answer(tier, count, 0, 0)
  end
end

local tiers
position = 1
while position <= #ARGV[3] do
  local operation, flags, count, key, limit, cost
  operation, flags, count, key, limit, cost, position = unpack_from('<BBI4HHd', ARGV[3], position)
  local tier = { key = key, limit = limits[limit], cost = cost, shadow = flags % 2 >= SHADOW,
    overdraft = flags % 4 >= OVERDRAFT }
  tier.state = state_of(key, tier.limit)
  if operation == REFUND then
    tier.time, position = unpack_from('<d', ARGV[3], position)
  end
  tiers = tiers or {}
  tiers[#tiers + 1] = tier
  if flags < MORE then
    if operation == CHECK or operation == PEEK then
      decide(operation, tiers, count)
    else
      adjust(operation, tiers, count)
    end
    tiers = nil
  end
end

for key, limit in pairs(written_under) do
  limit.algorithm.save(KEYS[key], states[key], limit)
end

return table.concat(replies)
