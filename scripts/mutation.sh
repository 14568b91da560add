#!/usr/bin/env bash
# The mutation check: disables every rule of the network policy, one
# at a time, and runs the rows of the probe table that guard it. Each must fail
# without its rule; a rule without a failing row is an error. Prints a table.
#
# The programs under test are built with the tag "mutation", without which no
# rule can be dropped. Guests are network namespaces with the kernel's own
# network stack, before a fake internet in which every address answers, so no
# packet leaves the machine. Needs root, or user namespaces, and /dev/net/tun.
#
#   scripts/mutation.sh [GO TEST FLAGS]
#
# AGENTLAB_TEST_MUTATION_VM=1 does the same once more in one real VM (some ten
# minutes under emulation).
#
# AGENTLAB_TEST_MUTANTS=always. disables only rules whose names begin so.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
out=$(mktemp)
trap 'rm -f "$out"' EXIT

packages=(./internal/egress/probe ./internal/egress/nft)
if [[ ${AGENTLAB_TEST_MUTATION_VM:-} == 1 ]]; then
    packages+=(./test/e2e)
fi
rc=0
AGENTLAB_MUTATION=1 "$go" test -tags mutation -count=1 -timeout 30m -v -run 'Mutation|EveryRuleIsGuarded' "$@" \
    "${packages[@]}" 2>&1 |
    grep --line-buffered -vE '^(=== |I[0-9]{4} )' | tee "$out" || rc=1

caught=$(grep -cE ' caught( |$)' "$out" || true)
missed=$(grep -cE ' MISSED( |$)' "$out" || true)
doubled=$(grep -cE ' DOUBLED: ' "$out" || true)
printf '%s rules disabled: %s caught, %s missed, %s doubled\n' "$((caught + missed + doubled))" "$caught" "$missed" "$doubled"
if [[ $doubled != 0 ]]; then
    echo "doubled (no row fails without the nft rule, because another mechanism has the same effect):"
    sed -nE 's/^ *[a-z_]+\.go:[0-9]+: (.*[^ ]) +DOUBLED: (.*)$/  \1: \2/p' "$out" | sort
fi
if [[ $rc != 0 || $missed != 0 || $caught == 0 ]] || grep -q -e '--- SKIP' "$out"; then
    echo "the mutation check failed or could not be run" >&2
    exit 1
fi
