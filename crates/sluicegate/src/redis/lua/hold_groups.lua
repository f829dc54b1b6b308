
-- Reads a group with holds. Its `fields` have the same layout as those of other groups; `ttls` and `ids` have the values of each
-- check, and `indexes` and `records` the keys of each tier, by the same positions.
local function read_held_group(group, position)
  group.excess, group.limit_texts, group.fields = {}, {}, {}
  group.ttls, group.ids, group.indexes, group.records = {}, {}, {}, {}
  local tiers, fields, limit, length = group.tiers, group.fields, nil, nil
  position = position + 4
  for tier = 1, tiers do
    group.flags[tier], limit, group.costs[tier], group.excess[tier], position = unpack_from('<BHdd', plan, position)
    group.terms[tier] = limits[limit]
    group.limit_texts[tier] = string.sub(ARGV[2], (limit - 1) * LIMIT_BYTES + 1, limit * LIMIT_BYTES)
  end
  for _ = 1, group.checks do
    local first = #fields + 1
    fields[first], group.ttls[first], length, position = unpack_from('<I4dH', plan, position)
    group.ids[first] = string.sub(plan, position, position + length - 1)
    position = position + length
    for place = first + 1, first + tiers do
      fields[place], group.indexes[place], group.records[place], position = unpack_from('<HHH', plan, position)
      if group.indexes[place] == 0 then
        group.indexes[place] = fields[place]
      end
    end
  end
end
