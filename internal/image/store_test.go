package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// quick replaces the real build in tests of the code around it: it writes
// small files whose digest depends only on version.
func quick(version string) func(*builder, context.Context) (*Stamp, error) {
	return func(b *builder, _ context.Context) (*Stamp, error) {
		r := b.recipe
		s := &Stamp{
			Name: r.Name, Arch: r.Arch, Suite: r.Suite, RecipeKey: r.Key(), Recipe: *r, SizeBytes: 4096, CreatedAt: b.now().UTC(),
			Packages: map[string]string{"git": version},
		}
		s.seal()
		if err := os.Mkdir(b.path("image"), 0o755); err != nil {
			return nil, err
		}
		for _, f := range []string{fileRoot, fileKernel, fileModules} {
			if err := os.WriteFile(b.path("image", f), make([]byte, 4096), 0o444); err != nil {
				return nil, err
			}
		}
		b.out.step("made %s", version)
		return s, s.write(b.path("image", fileStamp))
	}
}

// clock is a time that goes on by a second each time it is read.
func clock() func() time.Time {
	var n atomic.Int64
	return func() time.Time { return time.Unix(1_800_000_000+n.Add(1), 0) }
}

func newStore(t *testing.T, version string) *Store {
	t.Helper()
	s := NewStore(filepath.Join(t.TempDir(), "images"), Options{Now: clock()})
	s.make = quick(version)
	return s
}

func mustEnsure(t *testing.T, s *Store, ref string) Image {
	t.Helper()
	img, err := s.Ensure(t.Context(), ref, nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// buildDirs are the directories of builds, finished or not.
func buildDirs(t *testing.T, s *Store) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(s.root, buildDir, "*.d"))
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

func TestBuildingNamesWhatIsBuilt(t *testing.T) {
	s := newStore(t, "1")
	s.make = func(b *builder, ctx context.Context) (*Stamp, error) {
		if got := s.Building(); len(got) != 1 || got["base"].IsZero() {
			t.Errorf("during the build: %v", got)
		}
		return quick("1")(b, ctx)
	}
	if _, err := s.Ensure(t.Context(), "base", nil); err != nil {
		t.Fatal(err)
	}
	if got := s.Building(); len(got) != 0 {
		t.Errorf("after the build: %v", got)
	}
}

func TestEnsureBuildsOnce(t *testing.T) {
	s := newStore(t, "1")
	var builds atomic.Int32
	release := make(chan struct{})
	s.make = func(b *builder, ctx context.Context) (*Stamp, error) {
		builds.Add(1)
		<-release
		return quick("1")(b, ctx)
	}
	if _, err := s.Resolve(t.Context(), "base"); agentlab.CodeOf(err) != agentlab.CodeNotFound || !strings.Contains(agentlab.HintOf(err), "image build base") {
		t.Errorf("before the build: %v, hint %q", err, agentlab.HintOf(err))
	}
	var wg sync.WaitGroup
	var waiting atomic.Int32
	refs := make([]string, 5)
	for i := range refs {
		wg.Go(func() {
			// A Store each, as in processes of their own.
			mine := NewStore(s.root, s.opts)
			mine.make = s.make
			img, err := mine.Ensure(context.Background(), "base", func(line string) {
				if strings.Contains(line, "waiting") && waiting.Add(1) == int32(len(refs)-1) {
					close(release)
				}
			})
			if err != nil {
				t.Error(err)
			}
			refs[i] = img.Ref()
		})
	}
	wg.Wait()
	if n := builds.Load(); n != 1 {
		t.Errorf("%d builds", n)
	}
	for _, r := range refs {
		if r != refs[0] || r == "@" {
			t.Errorf("refs are %v", refs)
		}
	}
	if left := buildDirs(t, s); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestRebuild(t *testing.T) {
	s := newStore(t, "1")
	first := mustEnsure(t, s, "base")
	s.make = quick("2")
	if again := mustEnsure(t, s, "base"); again.Ref() != first.Ref() {
		t.Errorf("a fresh image was built again")
	}
	second, err := s.Build(t.Context(), BuildRequest{Name: "base", Force: true}, nil)
	if err != nil || second.Ref() == first.Ref() {
		t.Fatalf("forced build: %s, %v", second.Ref(), err)
	}
	if old, err := s.Resolve(t.Context(), first.Ref()); err != nil || old.Current {
		t.Errorf("the older image is not there by its digest, or current: %v", err)
	}
	list, err := s.List(t.Context())
	if err != nil || len(list) != 2 || list[0].Ref() != second.Ref() || !list[0].Current || list[1].Current {
		t.Errorf("list is %v, %v", list, err)
	}
	// An image that another recipe or builder made is stale.
	stale := second.Stamp
	stale.RecipeKey = "other"
	if err := errors.Join(os.Remove(filepath.Join(second.Dir, fileStamp)), stale.write(filepath.Join(second.Dir, fileStamp))); err != nil {
		t.Fatal(err)
	}
	s.make = quick("3")
	if third := mustEnsure(t, s, "base"); third.Packages["git"] != "3" {
		t.Errorf("a stale image is taken")
	}
	// The same content again: the directory that may be in use stays.
	s.make = quick("1")
	again, err := s.Build(t.Context(), BuildRequest{Name: "base", Force: true}, nil)
	if err != nil || again.Ref() != first.Ref() || !again.CreatedAt.Equal(first.CreatedAt) {
		t.Errorf("the same content was put anew: %v %v", again.CreatedAt, err)
	}
}

func TestOwnRecipe(t *testing.T) {
	s := newStore(t, "1")
	img, err := s.Build(t.Context(), BuildRequest{Name: "mine", Recipe: "extends: base\npackages: [gcc]\n"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := mustEnsure(t, s, "mine"); got.Ref() != img.Ref() {
		t.Errorf("ensure gives %s", got.Ref())
	}
	if got := mustEnsure(t, s, img.Ref()); got.Ref() != img.Ref() {
		t.Errorf("ensure by digest gives %s", got.Ref())
	}
	for _, tc := range []struct {
		req  BuildRequest
		code agentlab.Code
	}{
		{BuildRequest{Name: "base", Recipe: "suite: noble\n"}, agentlab.CodeInvalid},
		{BuildRequest{Name: "mine", Recipe: "name: yours\nsuite: noble\n"}, agentlab.CodeInvalid},
		{BuildRequest{Name: "mine", Recipe: "suit: noble\n"}, agentlab.CodeInvalid},
		{BuildRequest{Name: "../mine", Recipe: "suite: noble\n"}, agentlab.CodeInvalid},
		{BuildRequest{Name: "nothing"}, agentlab.CodeNotFound},
	} {
		if _, err := s.Build(t.Context(), tc.req, nil); agentlab.CodeOf(err) != tc.code {
			t.Errorf("%+v: %v, want %s", tc.req, err, tc.code)
		}
	}
}

func TestCheck(t *testing.T) {
	s := newStore(t, "1")
	img, err := s.Build(t.Context(), BuildRequest{Name: "mine", Recipe: "suite: noble\n"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	gone := "@" + strings.Repeat("0", digestLen)
	for ref, code := range map[string]agentlab.Code{
		"base": "", "agents": "", "mine": "", img.Ref(): "",
		"none": agentlab.CodeNotFound, "mine" + gone: agentlab.CodeNotFound, "base" + gone: agentlab.CodeNotFound,
		"": agentlab.CodeInvalid, "../x": agentlab.CodeInvalid, "mine@": agentlab.CodeInvalid, "mine@..": agentlab.CodeInvalid, "Mine": agentlab.CodeInvalid,
	} {
		if err := s.Check(ref); agentlab.CodeOf(err) != code {
			t.Errorf("Check(%q) = %v, want %q", ref, err, code)
		}
	}
	if hint := agentlab.HintOf(s.Check("none")); hint != "there are mine; not built yet: agents, base, dev" {
		t.Errorf("hint does not list what there is: %q", hint)
	}
}

func TestRemove(t *testing.T) {
	s := newStore(t, "1")
	var used string
	s.opts.InUse = func(ref string) (bool, error) { return ref == used, nil }
	first := mustEnsure(t, s, "base")
	s.make = quick("2")
	second, err := s.Build(t.Context(), BuildRequest{Name: "base", Force: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	used = first.Ref()
	if err := s.Remove(t.Context(), first.Ref()); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("an image in use: %v", err)
	}
	if err := s.Remove(t.Context(), "base"); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("a name with an image in use: %v", err)
	}
	if _, err := s.Resolve(t.Context(), second.Ref()); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("the one not in use is still there: %v", err)
	}
	if _, err := s.Resolve(t.Context(), first.Ref()); err != nil {
		t.Errorf("the one in use is gone: %v", err)
	}
	if _, err := s.Resolve(t.Context(), "base"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("the name still means something: %v", err)
	}
	used = ""
	if err := s.Remove(t.Context(), "base"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(s.root, "base")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the name's directory is left: %v", err)
	}
	if err := s.Remove(t.Context(), "base"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("twice: %v", err)
	}
}

// The path of an image is the same through every link to the cache.
func TestPathThroughLink(t *testing.T) {
	s := newStore(t, "1")
	img := mustEnsure(t, s, "base")
	link := filepath.Join(t.TempDir(), "cache")
	if err := os.Symlink(filepath.Dir(s.root), link); err != nil {
		t.Fatal(err)
	}
	got, err := NewStore(filepath.Join(link, "images"), Options{}).Resolve(t.Context(), "base")
	if err != nil || got.RootDisk() != img.RootDisk() {
		t.Errorf("%s and %s, %v", got.RootDisk(), img.RootDisk(), err)
	}
}

func TestDamaged(t *testing.T) {
	for _, file := range []string{fileRoot, fileKernel, fileModules, fileStamp} {
		t.Run(file, func(t *testing.T) {
			s := newStore(t, "1")
			img := mustEnsure(t, s, "base")
			path := filepath.Join(img.Dir, file)
			if err := errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			_, err := s.Resolve(t.Context(), "base")
			if agentlab.CodeOf(err) != agentlab.CodeInternal || !strings.Contains(agentlab.HintOf(err), "image rm "+img.Ref()) {
				t.Errorf("%v, hint %q", err, agentlab.HintOf(err))
			}
			if got := mustEnsure(t, s, "base"); got.Ref() != img.Ref() {
				t.Errorf("it is not built again: %s", got.Ref())
			}
		})
	}
}

func TestFailedBuildLeavesNothing(t *testing.T) {
	s := newStore(t, "1")
	first := mustEnsure(t, s, "base")
	s.make = func(b *builder, _ context.Context) (*Stamp, error) {
		if err := writeFile(b.path("tree", "etc", "passwd"), "x", 0o644); err != nil {
			return nil, err
		}
		return nil, agentlab.Errorf(agentlab.CodeNoSpace, "full")
	}
	if _, err := s.Build(t.Context(), BuildRequest{Name: "base", Force: true}, nil); agentlab.CodeOf(err) != agentlab.CodeNoSpace {
		t.Errorf("error is %v", err)
	}
	if left := buildDirs(t, s); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if img, err := s.Resolve(t.Context(), "base"); err != nil || img.Ref() != first.Ref() {
		t.Errorf("the image from before: %v, %v", img.Ref(), err)
	}
	log, err := os.ReadFile(s.logPath("base"))
	if err != nil || !strings.Contains(string(log), "E: full") {
		t.Errorf("the log does not tell why: %q, %v", log, err)
	}
}

// TestBuildIsKilled kills a process in the middle of a build, with a child
// running: nothing goes on, and the next build clears up and succeeds.
func TestBuildIsKilled(t *testing.T) {
	if root := os.Getenv("AGENTLAB_TEST_BUILD"); root != "" {
		s := NewStore(root, Options{})
		s.make = func(b *builder, ctx context.Context) (*Stamp, error) {
			if err := writeFile(b.path("tree", "file"), "x", 0o644); err != nil {
				return nil, err
			}
			fmt.Println("building")
			return nil, run(ctx, b.out, os.Environ(), isolated("sleep", os.Getenv("AGENTLAB_TEST_SLEEP"))...)
		}
		_, err := s.Ensure(context.Background(), "base", nil)
		t.Fatal("the build ended", err)
	}
	if err := checkNamespaces(t.Context()); err != nil {
		t.Skipf("no namespaces here: %v", err)
	}
	s := newStore(t, "1")
	sleep := fmt.Sprintf("%d.77", 100_000+os.Getpid())
	cmd := exec.Command(os.Args[0], "-test.run", "^TestBuildIsKilled$")
	cmd.Env = append(os.Environ(), "AGENTLAB_TEST_BUILD="+s.root, "AGENTLAB_TEST_SLEEP="+sleep)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	guard.Until(t, "the child runs", func() bool { return running(t, sleep) })
	s.Sweep(t.Context())
	if len(buildDirs(t, s)) != 1 {
		t.Error("a build that goes on was swept away")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	guard.Until(t, "the child is dead", func() bool { return !running(t, sleep) })
	if len(buildDirs(t, s)) != 1 {
		t.Error("the killed build left nothing; the test shows nothing")
	}
	mustEnsure(t, s, "base")
	if left := buildDirs(t, s); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestSweep(t *testing.T) {
	s := newStore(t, "1")
	mustEnsure(t, s, "base")
	dead := filepath.Join(s.root, buildDir, "base.123.d", "tree")
	if err := os.MkdirAll(dead, 0o755); err != nil {
		t.Fatal(err)
	}
	s.Sweep(t.Context())
	if left := buildDirs(t, s); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := s.Resolve(t.Context(), "base"); err != nil {
		t.Error(err)
	}
}

func TestWaitingIsCancelled(t *testing.T) {
	s := newStore(t, "1")
	unlock, err := s.lockName(t.Context(), "base", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithCancel(t.Context())
	_, err = s.Ensure(ctx, "base", func(string) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
}

// running reports whether a process "sleep" with this argument exists. A
// program that is yet to become it does not count: until then unshare has not
// asked to be killed with its parent.
func running(t *testing.T, seconds string) bool {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(data), "sleep\x00"+seconds+"\x00") {
			return true
		}
	}
	return false
}

// A missing shipped image can be replaced by a part of it, for a session that starts at
// once; nothing else can.
func TestIsPart(t *testing.T) {
	s := newStore(t, "1")
	for _, c := range []struct {
		part, ref string
		want      bool
	}{
		{"agents", "dev", true}, {"base", "dev", true}, {"base", "agents", true},
		{"agents", "agents", false}, {"dev", "agents", false}, {"agents", "base", false},
		{"agents", "mine", false}, {"agents", "dev@0123456789abcdef0123", false}, {"mine", "dev", false},
	} {
		if got := s.IsPart(c.part, c.ref); got != c.want {
			t.Errorf("IsPart(%s, %s) = %v", c.part, c.ref, got)
		}
	}
	img := mustEnsure(t, s, "dev")
	if s.IsPart("agents", "dev") {
		t.Error("dev is built")
	}
	img.RecipeKey = "of an older recipe"
	if err := os.Remove(filepath.Join(img.Dir, fileStamp)); err != nil {
		t.Fatal(err)
	}
	if err := img.write(filepath.Join(img.Dir, fileStamp)); err != nil {
		t.Fatal(err)
	}
	if _, built, err := s.find("dev"); built || err != nil {
		t.Fatalf("it is still the current one: %v", err)
	}
	if s.IsPart("agents", "dev") {
		t.Error("an image of an older recipe counts as built")
	}
}
