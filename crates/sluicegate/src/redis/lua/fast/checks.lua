
-- Decides checks on the fast path and leaves the others to the general path: operations other than check, peek, hold and settle, shadow and
-- overdraft tiers, large numbers, changed limits, and denials by anything but a token bucket without leases, whose level alone
-- determines the retry time. Once a check of a key is left to the general path, so are the later ones, so that they are decided in order.
-- Reads the groups from the plan. `fields` holds the count and the keys of each check.
local groups = {}
for group_number, start in pairs(group_starts) do
  local group, index = { terms = {}, flags = {}, costs = {} }, nil
  group.operation, group.path, group.tiers, group.checks, group.time, position = unpack_from(GROUP, plan, start)
  if group.path == LEASED then
    read_leased_group(group, position)
  elseif group.path == WITH_HOLDS then
    read_held_group(group, position)
  else
    for tier = 1, group.tiers do
      group.flags[tier], index, group.costs[tier], position = unpack_from(TIER, plan, position)
      group.terms[tier] = limits[index]
    end
    group.fields = { unpack_from('<' .. rep('I4' .. rep('H', group.tiers), group.checks), plan, position) }
  end
  groups[group_number] = group
end

for group_number = 1, group_count do
  local group = groups[group_number]
  if group and group.path == WITH_HOLDS then
    decide_held_group(group_number, group)
  elseif group and group.path ~= FAST_BUCKET then
    local operation, tiers, terms, fields = group.operation, group.tiers, group.terms, group.fields
    local is_leased = group.path == LEASED
    local is_fast, only_buckets = operation <= PEEK, true
    local request_parts, answers, free = {}, {}, {}
    for tier = 1, tiers do
      local limit, cost = terms[tier], group.costs[tier]
      request_parts[tier] = cost * limit.unit
      if group.flags[tier] > 0 or limit.ceiling >= MAX_FAST then
        is_fast = false
      end
      if limit.code ~= TOKEN_BUCKET then
        only_buckets = false
        is_fast = is_fast and operation == CHECK and cost > 0
      end
    end

    for first = 1, group.checks * (tiers + 1), tiers + 1 do
      local passed, tier = is_fast and fields[first] or -1, 1
      if is_leased and operation > PEEK and fields[first] == 0 then
        end_lease(group, first) -- all of it was spent: the counter stays as it is
        passed, tier, answers[first + 1] = 0, 2, 0
      end
      while passed >= 0 and tier <= tiers do
        local key, limit, parts = fields[first + tier], terms[tier], request_parts[tier]
        local level = levels[key]
        if level == nil then
          level = read[limit.code](key, limit)
          levels[key], limit_of[key] = level, limit
        end
        answers[first + tier] = level
        if not level or limit_of[key] ~= limit then
          passed = -1
        elseif level + passed * parts > limit.ceiling then
          passed = only_buckets and not is_leased and max(floor((limit.ceiling - level) / parts), 0) or -1
        end
        tier = tier + 1
      end
      if is_leased and passed > 0 then
        for tier = 1, tiers do
          local limit = terms[tier]
          free[tier] = (limit.ceiling - answers[first + tier] - passed * request_parts[tier]) / limit.unit
        end
        passed = passed + draw(group, first, free)
      end

      answers[first] = passed
      if passed < 0 then
        remaining[#remaining + 1] = { group = group_number, first = first, after = #held_answers }
        for tier = 1, tiers do
          answers[first + tier], levels[fields[first + tier]] = 0, false
        end
      elseif passed > 0 and operation == CHECK then
        for tier = 1, tiers do
          if request_parts[tier] > 0 then
            local key, level = fields[first + tier], answers[first + tier] + passed * request_parts[tier]
            levels[key], changed[key] = level, level
          end
        end
      end
    end
    replies[group_number] = pack('<' .. rep('d', #answers), unpack(answers))
  end
end

for key, level in pairs(changed) do
  local limit = limit_of[key]
  write[limit.code](key, limit, level)
end

if has_holds then
  save_held()
end

if #remaining == 0 then
  if has_leases then
    save_lease_records()
  end
  return reply_header .. table.concat(replies) .. table.concat(held_answers)
end
