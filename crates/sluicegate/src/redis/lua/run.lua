
-- Remaining checks of the fast bucket path come first here: restore the order of the plan.
table.sort(remaining, function(one, other)
  return one.group < other.group or (one.group == other.group and one.first < other.first)
end)
local sent = 0 -- answers of the fast path
for _, check in ipairs(remaining) do
  local group, first = groups[check.group], check.first
  while sent < (check.after or 0) do
    sent = sent + 1
    replies[#replies + 1] = held_answers[sent]
  end
  if group.path == WITH_HOLDS then
    read_held_check(group, check.position)
    first = 1
  end
  local count = group.fields[first]
  if group.path == WITH_HOLDS then
    decide_held(group, first, count)
  elseif group.operation >= CHARGE then
    adjust(group, first, count)
  else
    decide(group, first, count)
  end
end

for key, limit in pairs(dirty_limits) do
  limit.algorithm.save(KEYS[key], states[key], limit)
end
if has_leases then
  save_lease_records()
end
if has_holds then
  save_hold_indexes()
end

return reply_header .. table.concat(replies) .. table.concat(held_answers, '', sent + 1)
