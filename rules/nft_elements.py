"""Plans that only put elements into maps or take them out.

Their batch names the generation of the ruleset that the plan was made for, and the kernel refuses
it whole if there has been another since. So what there is afterwards is known without a look.
"""

from rules.model import Live, Observed, Rule
from rules.plan import Plan, Table
from rules.shapes import lives, lookup_of
from rules.values import replace


def are_elements(plan: Plan) -> bool:
    """Whether a plan can be carried out this way; one that writes nothing makes no generation."""
    if plan.table is not Table.KEEP or plan.chains or plan.maps != plan.mapped.keys():
        return False
    olds, news = (*plan.remove, *(live for live, _ in plan.change)), _new(plan)
    return (
        bool(olds or news)
        and all(isinstance(old, Live) and not old.handle for old in olds)
        and all(lookup_of(rule) in plan.maps for rule in news)
    )


def is_for(plan: Plan, observed: Observed) -> bool:
    """Whether it takes away what is there, and adds what is not."""
    here = lives(observed).by_rule
    return all(old.rule in here for old in _gone(plan)) and here.keys().isdisjoint(_new(plan))


def carried_out(plan: Plan, observed: Observed) -> Observed:
    """What there is after such a plan, if nobody else did anything."""
    return replace(observed, live=lives(observed).changed(_gone(plan), _new(plan)))


def _gone(plan: Plan) -> list[Live]:
    olds = (*plan.remove, *(live for live, _ in plan.change))
    return [old for old in olds if isinstance(old, Live)]


def _new(plan: Plan) -> list[Rule]:
    return [*(rule for _, rule in plan.change), *plan.add]
