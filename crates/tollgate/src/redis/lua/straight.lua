
-- The straight path: checks of a single token bucket that nothing else in the batch touches, whose numbers
-- stay small and all of whose requests pass. It does in one piece what token_bucket.lua and main.lua do
-- in general, with the level as one number: parts of a unit, `micros` of them to a unit. What it leaves
-- is theirs: `rest` has the number of each such tier, and where in the plan it stands. Quotients are taken
-- by remainders, which cost less here than calls of `floor` and `ceil`.
local rest, tier = {}, 0
position = 1
while position <= #plan do
  local from = position
  local operation, flags, count, key, index, cost
  operation, flags, count, key, index, cost, position = unpack_from('<BBI4HHd', plan, position)
  tier = tier + 1
  if operation == 3 then
    position = position + 8
  end
  local limit, raw, done = limits[index], strings[key], false
  if flags == 8 and operation == 0 and limit.code == 3 then
    local units, micros = limit.units, limit.micros
    local level, ttl_until = 0, 0
    if raw then
      local last, whole, part, old_units, old_micros
      last, whole, part, old_units, old_micros, ttl_until = unpack_from('<dddddd', raw)
      level = whole * micros + part
      local drained = (now - last) * units
      if old_units ~= units or old_micros ~= micros or last > now or level + drained >= 2 ^ 52 then
        level = nil
      else
        level = level > drained and level - drained or 0
      end
    end
    local charged = count * cost
    local after = level and level + charged * micros or 2 ^ 52
    if after < 2 ^ 52 then
      local started = after + micros - 1
      local free = limit.capacity - (started - started % micros) / micros
      if free >= 0 then
        done = true
        local reset = after + units - 1
        reset = (reset - reset % units) / units
        if charged > 0 then
          local left, lifetime, part = ttl_until - now, 2 * limit.window, after % micros
          if lifetime < reset then
            lifetime = reset
          end
          if raw and left >= reset and left <= lifetime + TTL_SLACK_US then
            call('SETRANGE', KEYS[key], '0', pack('<ddd', now, (after - part) / micros, part))
          else
            local millis = ceil(lifetime / 1000) + 1 + (injected and INJECTED_TTL_MS or 0)
            call('SET', KEYS[key],
              pack('<dddddd', now, (after - part) / micros, part, units, micros, now + lifetime),
              'PX', string.format('%.0f', millis))
          end
        end
        replies[tier + 1] = pack('<I4I4dddd', count, count, free, 0, reset, reset * units - after)
      end
    end
  end
  if not done then
    rest[#rest + 1] = tier
    rest[#rest + 1] = from
  end
end
if #rest == 0 then
  return table.concat(replies)
end
