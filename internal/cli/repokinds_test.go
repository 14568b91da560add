package cli_test

// repoKind is a kind of repository that users have.
type repoKind struct {
	// begin makes the repository app in the current directory, from the one that plain
	// makes if it begins with its name.
	begin string
	// start and job are what 'agentlab start' and 'job run' say if they refuse the
	// repository; "" if it works.
	start, job string
	// in is the directory in which the commands run; default app.
	in string
	// guest is a script that succeeds in the repository of the guest after the start.
	guest string
	// into is a branch for the sync of a repository without a current branch.
	into string
	// held says that the return check holds what the guest commits, or that git has no
	// merge now.
	noMerge string
}

// plain makes a repository with three commits.
const plain = `git init -q -b main app
for n in 1 2 3; do echo $n >app/file; echo past $n >app/past; echo $n >app/file$n; mkdir -p app/dir; echo $n >app/dir/file; git -C app add -A; git -C app commit -qm $n; done
`

// clone makes app a clone of the repository origin, which plain has made.
const clone = plain + "mv app origin; git -C origin config uploadpack.allowFilter true\n"

var repoKinds = map[string]repoKind{
	"plain":                  {begin: plain, guest: `test "$(cat file)" = 3`},
	"a clone":                {begin: clone + `git clone -q origin app`},
	"a subdirectory":         {begin: plain, in: "app/dir"},
	"a linked work tree":     {begin: plain + `git -C app worktree add -q ../linked -b topic`, in: "linked"},
	"worktree configuration": {begin: plain + `cd app; git config extensions.worktreeConfig true; git config --worktree core.quotePath false`},
	"a separate directory":   {begin: plain + `git init -q --separate-git-dir=store app`},
	"core.worktree":          {begin: plain + `git -C app config core.worktree "$PWD/app"`},
	"alternates":             {begin: clone + `git clone -q --shared origin app`},
	"a reference clone":      {begin: clone + `git clone -q --reference origin "file://$PWD/origin" app`},
	"packed":                 {begin: plain + `cd app; git branch other; git tag -a v1 -m v1; git tag main; git gc -q; git pack-refs --all; git commit-graph write; git multi-pack-index write`},
	"branch with slashes":    {begin: plain + `git -C app checkout -q -b feature/ä/x`},
	"many branches":          {begin: plain + `cd app; for i in $(seq 300); do echo "create refs/heads/b$i HEAD"; done | git update-ref --stdin`},
	"a detached HEAD":        {begin: plain + `git -C app checkout -q --detach HEAD~1`, into: "back"},
	"an empty commit":        {begin: `git init -q -b main app; git -C app commit -q --allow-empty -m first`},
	"without a commit":       {begin: `git init -q -b main app`, start: "has no commit yet", job: "has no commit yet"},
	"another default branch": {begin: clone + `git -C origin checkout -q -b develop; git clone -q origin app; git -C app checkout -q -b topic`, guest: `git rev-parse -q --verify develop`},

	"not a repository":   {begin: `mkdir app`, start: "not in the work tree of a git repository", job: "is not a git repository"},
	"bare":               {begin: clone + `git clone -q --bare origin app`, start: "is a bare repository"},
	"core.bare":          {begin: plain + `git -C app config core.bare true`, start: "is a bare repository"},
	"SHA-256":            {begin: `git init -q --object-format=sha256 -b main app; git -C app commit -q --allow-empty -m first`, start: "uses SHA-256 object names", job: "uses SHA-256 object names"},
	"reftable":           {begin: plain + `cd app; git config core.repositoryFormatVersion 1; git config extensions.refStorage reftable`, start: "refstorage", job: "refstorage"},
	"another owner":      {begin: plain + `chown -R 12345 app`, start: "dubious ownership", job: "dubious ownership"},
	"a shallow clone":    {begin: clone + `git clone -q --depth 1 "file://$PWD/origin" app`, start: "is a shallow clone", job: "is a shallow clone"},
	"a partial clone":    {begin: clone + `git clone -q --filter=blob:none "file://$PWD/origin" app`, start: "is a partial clone", job: "is a partial clone"},
	"a treeless clone":   {begin: clone + `git clone -q --filter=tree:0 "file://$PWD/origin" app`, start: "is a partial clone", job: "is a partial clone"},
	"a complete partial": {begin: clone + `git clone -q --filter=blob:none "file://$PWD/origin" app; git -C app fetch -q --refetch --no-filter || git -C app fetch -q --refetch --filter=blob:limit=1g`},
	"a missing object":   {begin: plain + `cd app; o=$(git rev-parse HEAD~1:file); rm -f .git/objects/$(echo $o | cut -c1-2)/$(echo $o | cut -c3-)`, start: "cannot be packed|cannot pack", job: "cannot be packed|cannot pack"},

	"sparse":              {begin: plain + `git -C app sparse-checkout set --cone nothing`, guest: `test -f dir/file`},
	"sparse patterns":     {begin: plain + `cd app; git sparse-checkout set --no-cone '/file1' '!/dir'; git update-index --skip-worktree file1`, guest: `test -f dir/file`},
	"a sparse index":      {begin: plain + `git -C app sparse-checkout set --cone --sparse-index nothing`, guest: `test -f dir/file`},
	"replaced objects":    {begin: plain + `cd app; git replace --graft HEAD; git replace -l | grep -q .`, guest: `test $(git rev-list --count HEAD) = 3`},
	"a replaced blob":     {begin: plain + `cd app; git replace $(git rev-parse HEAD:file) $(echo other | git hash-object -w --stdin)`, guest: `test "$(cat file)" = 3`},
	"grafts":              {begin: plain + `cd app; git rev-parse HEAD >.git/info/grafts`, guest: `test $(git rev-list --count HEAD) = 3`},
	"in a merge":          {begin: plain + `cd app; git checkout -q -b other HEAD~1; echo x >file; git commit -qam x; ! git merge -q main 2>&1`, noMerge: "not finished"},
	"in a rebase":         {begin: plain + `cd app; git checkout -q -b other HEAD~1; echo x >file; git commit -qam x; ! git rebase -q main 2>&1`, into: "back"},
	"in a bisect":         {begin: plain + `cd app; git bisect start HEAD HEAD~2 >/dev/null`, into: "back"},
	"in a cherry-pick":    {begin: plain + `cd app; git checkout -q -b other HEAD~1; echo x >file; git commit -qam x; ! git cherry-pick main 2>&1`, noMerge: "not finished"},
	"a nested repository": {begin: plain + `cd app; git init -q nested; git -C nested commit -q --allow-empty -m x`},

	"submodules":             {begin: clone + `git clone -q origin app; cd app; git -c protocol.file.allow=always submodule --quiet add "$PWD/../origin" lib/a; git commit -qm sub`, guest: `test "$(cat lib/a/file)" = 3`},
	"a submodule of its own": {begin: plain + `cp -r app sub; mv sub app/sub; cd app; git add sub 2>/dev/null; git commit -qm sub`, guest: `test "$(cat sub/file)" = 3`},
	"an absent submodule":    {begin: plain + `cd app; git update-index --add --cacheinfo 160000,$(git rev-parse HEAD),lib; git commit -qm sub`},
	"a shallow submodule":    {begin: clone + `git clone -q origin app; cd app; git -c protocol.file.allow=always submodule --quiet add --depth 1 "file://$PWD/../origin" lib; git commit -qm sub`, guest: `test ! -e lib/file`},

	"names in other cases": {begin: plain + `cd app; echo a >NAME; echo b >name; git add -A; git commit -qm names`, guest: `test "$(cat NAME name)" = "$(printf 'a\nb')"`},
	"long names":           {begin: plain + `cd app; n=$(printf '%0200d' 1); mkdir -p $n/$n/$n; echo x >$n/$n/$n/$n; git add -A; git commit -qm names`, guest: `git ls-files | grep -q 0001/`},
	"odd names":            {begin: plain + `cd app; echo x >"$(printf 'a\tb\nc')"; echo x >'-x y"'; echo x >'ä:(glob)*'; git add -A; git commit -qm names`},
	"links":                {begin: plain + `cd app; ln -s file link; ln -s /nonexistent absolute; ln -s .. up; git add -A; git commit -qm links`, guest: `test "$(readlink absolute)" = /nonexistent`},
	"binary and programs":  {begin: plain + `cd app; head -c 300000 /dev/urandom >big; : >empty; echo x >run; chmod +x run; git add -A; git commit -qm files`, guest: `test -x run`},
	"line endings":         {begin: plain + `cd app; git config core.autocrlf true; printf 'a\r\nb\r\n' >crlf; git add crlf; git commit -qm crlf; printf '*.txt eol=crlf\n' >.gitattributes; printf 'x\r\n' >y.txt; git add -A; git commit -qm attributes`},

	"a required filter": {begin: plain + `cd app; git config filter.crypt.clean 'sed s/a/b/'; git config filter.crypt.smudge false; git config filter.crypt.required true; echo '*.key filter=crypt' >.gitattributes; echo a >x.key; git add -A; git commit -qm key`, guest: `test "$(cat x.key)" = b`},
	"hooks that fail":   {begin: plain + `cd app; for h in pre-push post-checkout post-merge pre-merge-commit reference-transaction pre-auto-gc; do printf '#!/bin/sh\nexit 1\n' >.git/hooks/$h; chmod +x .git/hooks/$h; done`},
	"index formats":     {begin: plain + `cd app; git config core.untrackedCache true; git config core.splitIndex true; git config index.version 4; git config core.fsmonitor false; git update-index --split-index --untracked-cache`},
	"LFS":               {begin: plain + lfsFiles, guest: `test "$(cat a.bin)" = one && grep -q ^version gone.bin && test -z "$(git status --porcelain)"`},
	"no LFS filter":     {begin: plain + lfsFiles + `git config --unset-all filter.lfs.clean`, guest: `test "$(cat a.bin)" = one`},
}

// lfsFiles adds files of Git LFS, one of them without its object.
const lfsFiles = `cd app; git config filter.lfs.clean "git-lfs clean -- %f"
git config filter.lfs.smudge "git-lfs smudge -- %f"; git config filter.lfs.required true
echo '*.bin filter=lfs diff=lfs merge=lfs -text' >.gitattributes; printf one >a.bin; printf gone >gone.bin
git add -A; git commit -qm LFS; rm -r .git/lfs/objects/$(git show :gone.bin | sed -n 's/^oid sha256:\(..\).*/\1/p')
`
