
-- Decides the checks, and leaves to the general path what takes it: operations other than check and peek, shadow
-- and overdraft tiers, large numbers, other limits than before, refusals by anything but a bucket, whose level alone
-- says when to come back. A key that is left takes its later checks with it, so that it sees all of them in order.
local CHECK, PEEK = 0, 1

-- A group, read from the plan. In `fields`, each check has its count and its keys.
local groups = {}
for group_number, start in pairs(starts) do
  local group, index = { terms = {}, flags = {}, costs = {} }, nil
  group.operation, group.is_plain, group.tiers, group.checks, group.time, position = unpack_from(GROUP, plan, start)
  for tier = 1, group.tiers do
    group.flags[tier], index, group.costs[tier], position = unpack_from(TIER, plan, position)
    group.terms[tier] = limits[index]
  end
  group.fields = { unpack_from('<' .. rep('I4' .. rep('H', group.tiers), group.checks), plan, position) }
  groups[group_number] = group
end

-- By key: the level (false: left to the general path), under which limit, and the levels to be written.
local levels, limit_of, changed = {}, {}, {}

for group_number = 1, number do
  local group = groups[group_number]
  if group and group.is_plain == 0 then
    local operation, tiers, terms, fields = group.operation, group.tiers, group.terms, group.fields
    local is_straight, only_buckets = operation <= PEEK, true
    local needs, answers = {}, {}
    for tier = 1, tiers do
      local limit, cost = terms[tier], group.costs[tier]
      needs[tier] = cost * limit.unit
      if group.flags[tier] > 0 or limit.ceiling >= SMALL then
        is_straight = false
      end
      if limit.code ~= TOKEN_BUCKET then
        only_buckets = false
        is_straight = is_straight and operation == CHECK and cost > 0
      end
    end

    for first = 1, group.checks * (tiers + 1), tiers + 1 do
      local passed, tier = is_straight and fields[first] or -1, 1
      while passed >= 0 and tier <= tiers do
        local key, limit, need = fields[first + tier], terms[tier], needs[tier]
        local level = levels[key]
        if level == nil then
          level = read[limit.code](key, limit)
          levels[key], limit_of[key] = level, limit
        end
        answers[first + tier] = level
        if not level or limit_of[key] ~= limit then
          passed = -1
        elseif level + passed * need > limit.ceiling then
          passed = only_buckets and max(floor((limit.ceiling - level) / need), 0) or -1
        end
        tier = tier + 1
      end

      answers[first] = passed
      if passed < 0 then
        rest[#rest + 1] = { number = group_number, first = first }
        for tier = 1, tiers do
          answers[first + tier], levels[fields[first + tier]] = 0, false
        end
      elseif passed > 0 and operation == CHECK then
        for tier = 1, tiers do
          if needs[tier] > 0 then
            local key, level = fields[first + tier], answers[first + tier] + passed * needs[tier]
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

if #rest == 0 then
  return head .. table.concat(replies)
end
