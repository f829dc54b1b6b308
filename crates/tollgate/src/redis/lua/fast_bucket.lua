
-- The shortest way, for what is asked most: plain checks of token buckets. Each bucket is read, decided and written
-- in one go, with its level as one number: parts of a unit. Quotients are taken by remainders, which cost less
-- here than calls of `floor` and `ceil`. See token_bucket.lua for the general one.
local SMALL = 2 ^ 52 -- below this, all that is calculated here is exact

local position, number = 1, 0
while position <= #plan do
  local start, _, is_plain, tiers, checks = position, nil, nil, nil, nil
  _, is_plain, tiers, checks, _, position = unpack_from(GROUP, plan, position)
  number = number + 1
  if is_plain == 0 then
    starts[number] = start
    position = position + tiers * TIER_BYTES + checks * (4 + 2 * tiers)
  else
    local index, cost, window, capacity, units, micros
    _, index, cost, position = unpack_from(TIER, plan, position)
    _, _, window, capacity, _, units, micros = unpack_from(LIMIT, ARGV[2], (index - 1) * LIMIT_BYTES + 1)
    local need, ceiling, longest = cost * micros, capacity * micros, 2 * window + TTL_SLACK_US
    local fields = { unpack_from('<' .. rep('I4H', checks), plan, position) }
    position = fields[2 * checks + 1]
    for first = 1, 2 * checks, 2 do
      local passed, key = fields[first], fields[first + 1]
      local raw, level, left = strings[key], 0, -1
      if raw then
        local last, whole, part, old_units, old_micros, ttl_until = unpack_from('<dddddd', raw)
        level = whole * micros + part
        if old_units ~= units or old_micros ~= micros or last > now or level >= SMALL then
          level = nil
        else
          level, left = level - (now - last) * units, ttl_until - now
          if level < 0 then
            level = 0
          end
        end
      end
      if not level then
        passed = -1
        starts[number], rest[#rest + 1] = start, { number = number, first = first }
      else
        local after = level + passed * need
        if after > ceiling then
          passed = max(floor((ceiling - level) / need), 0)
          after = level + passed * need
        end
        fields[first + 1] = level
        if after > level then
          local part, drained = after % micros, after + units - 1
          local needed = (drained - drained % units) / units
          if left >= needed and left <= longest then
            call('SETRANGE', KEYS[key], '0', pack('<ddd', now, (after - part) / micros, part))
          else
            local ttl_until, millis = renewed_ttl(0, window, needed)
            call('SET', KEYS[key], pack('<dddddd', now, (after - part) / micros, part, units, micros, ttl_until),
              'PX', millis)
          end
        end
      end
      fields[first] = passed
    end
    replies[number] = pack('<' .. rep('d', 2 * checks), unpack(fields, 1, 2 * checks))
  end
end

local head = pack('<Bd', 0, now)
if not next(starts) then
  return head .. table.concat(replies)
end
