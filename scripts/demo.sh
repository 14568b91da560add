#!/usr/bin/env bash
# Demonstrates AgentLab: a job in a virtual machine changes a repository, and
# its commit is fetched. 'make demo' runs it after the build.
#
# All files are in .cache/demo, where the next run reuses the image,
# and in a temporary directory.
set -euo pipefail
if (($# > 0)); then
    echo "demo.sh takes no arguments; it runs a job in a virtual machine" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
export PATH="$PWD/bin:$PATH"
export AGENTLAB_HOME="$PWD/.cache/demo"
export GIT_PAGER=cat
mkdir -p "$AGENTLAB_HOME"

bold='' plain=''
if [[ -t 1 ]]; then
    bold=$'\033[1m' plain=$'\033[0m'
fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
show() {
    printf '$ %s\n' "$*"
    "$@"
}

tmp=$(mktemp -d)
repo="$tmp/hello"
finish() {
    agentlab daemon stop >/dev/null 2>&1 || true
    rm -rf "$tmp"
}
trap finish EXIT

say "1. A small repository with a failing test, in $repo"
mkdir "$repo"
cat >"$repo/greet.sh" <<'END'
#!/bin/sh
echo "Hello, wrold!"
END
cat >"$repo/test.sh" <<'END'
#!/bin/sh
[ "$(sh ./greet.sh)" = "Hello, world!" ] && echo "test passed" || { echo "test FAILED"; exit 1; }
END
git -C "$repo" init --quiet --initial-branch main
git -C "$repo" add .
git -C "$repo" -c user.name=Demo -c user.email=demo@example.invalid commit --quiet --message "A greeting"
show git -C "$repo" log --oneline

say "2. A job in a new virtual machine: fix it, run the test, commit"
echo "(agent 'shell' takes a script as its task; claude, codex, opencode and gemini take a prompt)"
agentlab image list 2>/dev/null | grep -q '^base ' || echo "(the image is built first; that takes a minute or two)"
task='set -e
sed -i s/wrold/world/ greet.sh
sh ./test.sh
git add -A
git commit -m "Fix the greeting"'
began=$(date +%s)
show agentlab job run --repo "$repo" --agent shell --task "$task"
echo "(it took $(($(date +%s) - began)) s)"
job=$(agentlab job list --limit 1 | awk 'NR == 2 { print $1 }')

say "3. The job and its artifacts"
show agentlab job show "$job"
say "   its log"
show agentlab job logs "$job"
say "   its artifacts"
show agentlab job artifacts "$job"

say "4. The commit, fetched into refs/agentlab/$job of the repository"
show agentlab job fetch "$job" --repo "$repo"
show git -C "$repo" log --oneline --all
ref=$(git -C "$repo" for-each-ref --format '%(refname)' "refs/agentlab/$job*" | head -n 1)
[[ -n $ref ]] || { echo "the job's commit was not fetched" >&2; exit 1; }
show git -C "$repo" diff main "$ref"
git -C "$repo" show "$ref:greet.sh" | grep -q "Hello, world!"

say "5. Nothing is left: no sandbox, and after the daemon stops no process"
show agentlab sandbox list
[[ $(agentlab sandbox list | wc -l) -le 1 ]] || { echo "a sandbox was not deleted" >&2; exit 1; }
show agentlab daemon stop
for _ in $(seq 50); do
    left=$(pgrep -f "$AGENTLAB_HOME" || true)
    [[ -n $left ]] || break
    sleep 0.1
done
if [[ -n $left ]]; then
    echo "still running:" >&2
    pgrep -af "$AGENTLAB_HOME" >&2
    exit 1
fi
echo "all processes have ended"

say "Done. With a real agent, in a repository of yours:"
echo "  agentlab login claude"
echo "  agentlab job run --repo . --agent claude --task 'Fix the failing test and commit'"
