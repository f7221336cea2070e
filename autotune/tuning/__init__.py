"""From a Plan to a Recommendation: probe, search, select.

Comes in: a plan, a runner of trials, a study. Goes out of each stage: a value that the next one takes (a ResolvedSpace,
a SearchOutcome, a Recommendation), with notes as codes and figures. Nothing here starts a
process, writes a file or makes a sentence for people; what proposes trials stands behind a seam, proposers/.
"""
