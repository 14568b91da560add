package agentcmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// interactive describes how to run an agent on a terminal, without any permission
// prompt and without the dialogs of its first start.
type interactive struct {
	args     []string // every permission is granted
	env      []string // defaults, which the environment overrides
	resume   []string // arguments that continue the last conversation in a directory
	state    []string // directories and files in home that hold conversations, without credentials
	settings func(t *tui) error
}

// interactives are the agents that have a terminal interface.
var interactives = map[string]interactive{
	"claude": {
		args:     []string{"--dangerously-skip-permissions"},
		env:      []string{"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL=1", "DISABLE_AUTOUPDATER=1", "IS_SANDBOX=1"},
		resume:   []string{"--continue"},
		state:    []string{".claude/projects/"},
		settings: claudeSettings,
	},
	"codex": {
		args:     []string{"--dangerously-bypass-approvals-and-sandbox"},
		resume:   []string{"resume", "--last"},
		state:    []string{".codex/sessions/"},
		settings: codexSettings,
	},
	"opencode": {
		env:    []string{`OPENCODE_PERMISSION={"*":"allow"}`, "OPENCODE_DISABLE_AUTOUPDATE=1", "OPENCODE_DISABLE_MODELS_FETCH=1"},
		resume: []string{"--continue"},
		state:  []string{".local/share/opencode/opencode.db"}, // SQLite follows the link and has its other files beside the target
	},
	"gemini": {
		args:     []string{"--approval-mode=yolo"},
		env:      []string{"GEMINI_CLI_TRUST_WORKSPACE=true"},
		resume:   []string{"--resume", "latest"},
		state:    []string{".gemini/tmp/", ".gemini/projects.json"},
		settings: geminiSettings,
	},
}

// tui is a start of an agent on a terminal.
type tui struct {
	name   string
	home   string
	dir    string // working directory
	state  string // directory on the workspace; "" if there is no workspace
	resume bool
	args   []string // of the user
	env    []string
	extra  []string // arguments that settings adds

	contained *contained // the dev container in which it runs; nil in the VM
}

// stateDir is the directory of a workspace for the agents' conversations.
const stateDir = ".agentlab"

// runTUI replaces this process by an agent on the terminal. It returns only an error.
// inside is the file of a tuiPlan in a dev container, and "" outside of it.
func runTUI(name string, resume bool, inside string, args []string) error {
	t := &tui{name: name, resume: resume, args: args, env: os.Environ()}
	var err error
	if t.dir, err = os.Getwd(); err != nil {
		return err
	}
	if inside != "" {
		err = t.enter(inside)
	} else if c := activeContainer(t.dir); c != nil {
		return t.leaveVM(c)
	}
	if err != nil {
		return err
	}
	t.home = get(t.env, "HOME")
	if st, err := os.Stat(filepath.Join(workspaceDir, stateDir)); err == nil && st.IsDir() {
		t.state = filepath.Join(workspaceDir, stateDir)
	}
	path, argv, env, err := t.command()
	if err != nil {
		return err
	}
	return syscall.Exec(path, argv, env)
}

// command writes the agent's settings and returns its command.
func (t *tui) command() (path string, argv, env []string, err error) {
	a, err := find(t.name)
	if err != nil {
		return "", nil, nil, err
	}
	in, ok := interactives[t.name]
	if !ok {
		return "", nil, nil, fmt.Errorf("%s has no terminal interface", t.name)
	}
	t.env = withDefaults(t.env, slices.Concat(in.env, []string{"LANG=C.UTF-8", "COLORTERM=truecolor"}))
	if path = lookPath(a.program, get(t.env, "PATH")); path == "" {
		return "", nil, nil, notInstalled{a}
	}
	t.loadDirenv()
	found := t.keepState(in.state)
	if in.settings != nil {
		if err := in.settings(t); err != nil {
			return "", nil, nil, fmt.Errorf("the settings of %s cannot be written: %w", t.name, err)
		}
	}
	argv = slices.Concat([]string{a.program}, t.extra, in.args)
	if t.contained != nil {
		if path, argv, err = t.contained.interpret(path, argv); err != nil {
			return "", nil, nil, err
		}
	}
	if t.resume && found { // an agent that has no conversation yet would fail
		argv = append(argv, in.resume...)
	}
	return path, append(argv, t.args...), t.env, nil
}

// keepState links the files with conversations to the workspace, so that they
// outlive the sandbox. What exists in their place stays as it is. It reports whether
// there is a conversation.
func (t *tui) keepState(names []string) (found bool) {
	for _, name := range names {
		dir := strings.HasSuffix(name, "/")
		at := filepath.Join(t.home, name)
		if t.state != "" {
			t.linkState(at, filepath.Join(t.state, strings.TrimPrefix(name, ".")), dir)
		}
		if dir {
			list, err := os.ReadDir(at)
			found = found || err == nil && len(list) > 0
		} else if st, err := os.Stat(at); err == nil && st.Size() > 0 {
			found = true
		}
	}
	return found
}

func (t *tui) linkState(at, target string, dir bool) {
	need := filepath.Dir(target)
	if dir {
		need = target
	}
	if err := errors.Join(os.MkdirAll(need, 0o700), os.MkdirAll(filepath.Dir(at), 0o700)); err != nil {
		return // the conversation ends with the sandbox
	}
	_ = os.Symlink(target, at)
}

// direnvConfig is the directory of direnv's configuration in images: it trusts the
// repository of a session and loads .env files.
const direnvConfig = "/etc/direnv"

// loadDirenv adds the environment that direnv has for the working directory, as in a
// shell there. Without direnv, or if it fails, the environment stays as it is.
func (t *tui) loadDirenv() {
	path := lookPath("direnv", get(t.env, "PATH"))
	if path == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), direnvTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "export", "json")
	cmd.Dir, cmd.Env = t.dir, withDefaults(t.env, []string{"DIRENV_CONFIG=" + direnvConfig})
	out := bounded.Head{Max: maxSettings}
	errOut := bounded.Tail{Max: 4 << 10}
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &errOut, time.Second
	var changes map[string]*string
	err := cmd.Run()
	if err == nil && out.String() != "" {
		err = json.Unmarshal([]byte(out.String()), &changes)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "agentlab-agent: the environment of direnv is not used: %v\n%s", err, errOut.String())
		return
	}
	for name, value := range changes {
		t.env = slices.DeleteFunc(t.env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
		if value != nil {
			t.env = append(t.env, name+"="+*value)
		}
	}
}

// direnvTimeout limits the programs that an .envrc runs.
const direnvTimeout = time.Minute

// maxSettings limits the size of an agent's settings that are changed, in bytes.
const maxSettings = 16 << 20

// edit changes a JSON file of an agent in home. fn reports whether it has changed
// anything. A file that is not JSON is renamed with the suffix ".orig".
func (t *tui) edit(name string, fn func(map[string]any) bool) error {
	at := filepath.Join(t.home, name)
	doc := map[string]any{}
	switch st, err := os.Stat(at); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case st.Size() > maxSettings:
		return fmt.Errorf("%s is too large", name)
	default:
		p, err := os.ReadFile(at)
		if err != nil {
			return err
		}
		if json.Unmarshal(p, &doc) != nil || doc == nil {
			doc = map[string]any{}
			if err := os.Rename(at, at+".orig"); err != nil {
				return err
			}
		}
	}
	if !fn(doc) {
		return nil
	}
	p, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
		return err
	}
	tmp := at + ".agentlab-new"
	if err := os.WriteFile(tmp, p, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, at)
}

// object returns the object at a key, which it adds if it is missing.
func object(doc map[string]any, key string) map[string]any {
	sub, ok := doc[key].(map[string]any)
	if !ok {
		sub = map[string]any{}
		doc[key] = sub
	}
	return sub
}

// put sets a key and reports whether that changes the document.
func put(doc map[string]any, key string, value any) bool {
	if doc[key] == value {
		return false
	}
	doc[key] = value
	return true
}

// claudeSettings answers the questions of Claude Code's first start: onboarding, the
// use of an API key, trust in the directory, and the mode without permissions.
func claudeSettings(t *tui) error {
	return t.edit(".claude.json", func(doc map[string]any) bool {
		changed := false
		for _, key := range []string{"hasCompletedOnboarding", "hasSeenAutoDefaultNudge", "bypassPermissionsModeAccepted"} {
			changed = put(doc, key, true) || changed
		}
		// The entry of a parent directory counts.
		changed = put(object(object(doc, "projects"), parentOf(t.dir)), "hasTrustDialogAccepted", true) || changed
		if key := get(t.env, "ANTHROPIC_API_KEY"); key != "" {
			keys := object(doc, "customApiKeyResponses")
			approved, _ := keys["approved"].([]any)
			if end := key[max(0, len(key)-20):]; !slices.Contains(approved, any(end)) {
				keys["approved"], changed = append(approved, end), true
			}
			if keys["rejected"] == nil {
				keys["rejected"] = []any{}
			}
		}
		return changed
	})
}

// parentOf returns the directory of all work trees, or dir itself.
func parentOf(dir string) string {
	if dir == guestapi.RepoDir || strings.HasPrefix(dir, guestapi.RepoDir+"/") {
		return guestapi.RepoDir
	}
	return dir
}

// codexSettings adds arguments instead of a file: Codex trusts an exact directory,
// and two of them can start at once. With a key in the environment it also needs a
// provider, or else it asks for a login.
func codexSettings(t *tui) error {
	dir, _ := json.Marshal(t.dir) // a basic string of TOML
	set := []string{
		"check_for_update_on_startup=false", "analytics.enabled=false",
		"features.plugins=false", "features.daemon_auto_start=false",
		"features.shell_snapshot=false", // it writes the key to a file
		"projects={" + string(dir) + `={trust_level="trusted"}}`,
	}
	_, err := os.Stat(filepath.Join(t.home, ".codex/auth.json"))
	if err != nil && get(t.env, "OPENAI_API_KEY") != "" && get(t.env, "OPENAI_BASE_URL") == "" {
		set = append(set, `model_provider="agentlab"`,
			`model_providers.agentlab={name="OpenAI",wire_api="responses",env_key="OPENAI_API_KEY",base_url="https://api.openai.com/v1"}`)
	}
	for _, s := range set {
		t.extra = append(t.extra, "-c", s)
	}
	return nil
}

// geminiSettings chooses the login by key, which Gemini CLI asks for even with a key
// in the environment.
func geminiSettings(t *tui) error {
	return t.edit(".gemini/settings.json", func(doc map[string]any) bool {
		security, general := object(doc, "security"), object(doc, "general")
		changed := put(object(security, "folderTrust"), "enabled", false)
		if auth := object(security, "auth"); get(t.env, "GEMINI_API_KEY") != "" && auth["selectedType"] == nil {
			changed = put(auth, "selectedType", "gemini-api-key") || changed
		}
		changed = put(general, "enableAutoUpdate", false) || changed
		changed = put(general, "enableAutoUpdateNotification", false) || changed
		return put(object(doc, "privacy"), "usageStatisticsEnabled", false) || changed
	})
}
