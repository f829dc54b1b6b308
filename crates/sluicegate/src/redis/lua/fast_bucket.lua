
-- The fast bucket path, for the most frequent checks: one small token bucket each. Each bucket is read, decided and written in
-- one step, with its level as one number in parts of a unit. Quotients are computed from remainders, which are cheaper here
-- than calls of `floor` and `ceil`. token_bucket.lua is the general version.
local MAX_FAST = 2 ^ 52 -- all arithmetic on the fast paths is exact below this
local BUCKET_BYTES = 48

local position, group_count, has_leases, has_holds = 1, 0, false, false
while position <= #plan do
  local start, _, path, tiers, checks = position, nil, nil, nil, nil
  _, path, tiers, checks, _, position = unpack_from(GROUP, plan, position)
  group_count = group_count + 1
  if path ~= FAST_BUCKET then
    group_starts[group_count] = start
    if path == WITH_HOLDS then
      has_holds = true
      local length
      length, position = unpack_from('<I4', plan, position)
      position = position + length
    else
      position = position + tiers * TIER_BYTES + checks * (4 + 2 * tiers)
    end
    if path == LEASED then
      has_leases = true
      position = position + tiers * 16 + checks * (4 + 2 * tiers)
    end
  else
    local index, cost, window, capacity, units, micros
    _, index, cost, position = unpack_from(TIER, plan, position)
    _, _, window, capacity, _, units, micros = unpack_from(LIMIT, ARGV[2], (index - 1) * LIMIT_BYTES + 1)
    local request_parts, ceiling, max_ttl = cost * micros, capacity * micros, 2 * window + TTL_SLACK_US
    local fields = { unpack_from('<' .. rep('I4H', checks), plan, position) }
    position = fields[2 * checks + 1]
    for first = 1, 2 * checks, 2 do
      local passed, key = fields[first], fields[first + 1]
      local raw, level, ttl_left = stored[key], 0, -1
      if raw then
        level = nil
        if #raw == BUCKET_BYTES then
          local last, whole, part, old_units, old_micros, ttl_until = unpack_from('<dddddd', raw)
          local parts = whole * micros + part
          -- every comparison with a number that is not a number is false
          if old_units == units and old_micros == micros and last <= now and parts < MAX_FAST and last >= 0
            and whole >= 0 and part >= 0 and ttl_until >= 0 and ttl_until <= MAX_TTL_END
            and (last + ttl_until) % 1 == 0 and (whole + part) % 1 == 0 then
            level, ttl_left = parts - (now - last) * units, ttl_until - now
            if level < 0 then
              level = 0
            end
          end
        end
      end
      if not level then
        passed = -1
        group_starts[group_count], remaining[#remaining + 1] = start, { group = group_count, first = first }
      else
        local after = level + passed * request_parts
        if after > ceiling then
          passed = max(floor((ceiling - level) / request_parts), 0)
          after = level + passed * request_parts
        end
        fields[first + 1] = level
        if after > level then
          local part, drained = after % micros, after + units - 1
          local needed = (drained - drained % units) / units
          if ttl_left >= needed and ttl_left <= max_ttl then
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
    replies[group_count] = pack('<' .. rep('d', 2 * checks), unpack(fields, 1, 2 * checks))
  end
end

local reply_header = pack('<Bd', 0, now)
if not next(group_starts) then
  return reply_header .. table.concat(replies)
end
