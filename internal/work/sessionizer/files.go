package sessionizer

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// The files of the sessionizer, below the user's configuration directory.
const (
	reposFile     = "repos.txt"
	resourcesFile = "resources.yaml"
	allowlistFile = "network-allowlist.txt"
)

// maxFile bounds each of these files.
const maxFile = 256 << 10

// examples are the files as they are created on first use.
var examples = map[string]string{
	reposFile: `# Repositories of 'agentlab sessionizer', one a line: OWNER/REPO, which is cloned from
# GitHub, or OWNER/REPO and a URL or an absolute path of a repository on this machine.
#
# octocat/hello-world
# my-org/app  ~/src/app
# my-org/api  git@git.example.com:api.git
`,
	resourcesFile: `# Resources of the VMs of 'agentlab sessionizer'. They apply to new VMs.
defaults:
  cpus: 4
  memory: 8GiB
  disk: 50GiB
  # The profile that all other settings come from, such as the secrets bundle.
  profile: interactive
  # allowlist: only what network-allowlist.txt names; profile: the network of the profile.
  network: allowlist

# Starting more VMs than this requires a confirmation.
max_concurrent: 10

# overrides:
#   large-org/monorepo:
#     cpus: 8
#     memory: 16GiB
#     disk: 100GiB
`,
	allowlistFile: `# What the VMs of 'agentlab sessionizer' can reach, one rule a line, in the syntax of
# network.allow in a profile. Ports 80, 443 and 22. Changes apply to new VMs.
preset:anthropic
preset:openai
preset:google
preset:opencode
preset:github
preset:npm
preset:nodejs
preset:docker
preset:debian
preset:ubuntu
# example.com
# *.example.org:443
`,
}

// listedRepo is a repository in repos.txt.
type listedRepo struct {
	name   string // OWNER/REPO
	source string // URL or absolute path; "" means GitHub
}

// url is where the repository is cloned from.
func (r listedRepo) url() string {
	return cmp.Or(r.source, "https://github.com/"+r.name+".git")
}

// local reports whether the source is a directory of this machine.
func (r listedRepo) local() bool { return filepath.IsAbs(r.source) }

// sessionName is the name of the session and VM of the repository:
// agent-OWNER-REPO-HASH, a DNS label of at most 40 characters. Names at GitHub do not
// differ by case only.
func (r listedRepo) sessionName() string {
	name := strings.ToLower(r.name)
	slug := agentlab.SessionNameOf(name)
	slug = strings.Trim(slug[:min(len(slug), 40-len("agent--123456"))], "-")
	return "agent-" + slug + "-" + session.ShortHash(name)
}

// checkRepoName checks OWNER/REPO, which becomes a path.
func checkRepoName(name string) error {
	owner, repo, ok := strings.Cut(name, "/")
	for _, part := range []string{owner, repo} {
		ok = ok && part != "" && len(part) <= 100 && part[0] != '.' && part[0] != '-' &&
			strings.Trim(strings.ToLower(part), "abcdefghijklmnopqrstuvwxyz0123456789._-") == ""
	}
	if !ok {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not OWNER/REPO", name).WithHint("for example octocat/hello-world")
	}
	return nil
}

// contentLines calls fn for each line that is not empty or a comment.
func contentLines(file, text string, fn func(line string) error) error {
	n := 0
	for line := range strings.Lines(text) {
		n++
		if line, _, _ = strings.Cut(" "+strings.TrimSpace(line), " #"); strings.TrimSpace(line) == "" {
			continue
		}
		if err := fn(strings.TrimSpace(line)); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "%s: line %d: %w", file, n, err)
		}
	}
	return nil
}

// parseRepos parses repos.txt. home replaces "~" in paths.
func parseRepos(text, home string) (repos []listedRepo, err error) {
	seen := map[string]bool{}
	err = contentLines(reposFile, text, func(line string) error {
		name, source, _ := strings.Cut(line, " ")
		if n, s, tab := strings.Cut(name, "\t"); tab {
			name, source = n, s+" "+source
		}
		r := listedRepo{name: name, source: strings.TrimSpace(source)}
		if err := checkRepoName(r.name); err != nil {
			return err
		}
		if rest, ok := strings.CutPrefix(r.source, "~/"); ok {
			r.source = filepath.Join(home, rest)
		}
		if !r.local() {
			if err := agentlab.ValidateRepoURL(r.source); err != nil {
				return err
			}
		}
		key := strings.ToLower(r.name)
		if seen[key] {
			return agentlab.Errorf(agentlab.CodeInvalid, "%s is listed twice", r.name)
		}
		seen[key] = true
		repos = append(repos, r)
		return nil
	})
	return repos, err
}

// parseAllowlist parses network-allowlist.txt. The daemon checks the rules. A file
// without rules is an error, so that it is never read as "everything".
func parseAllowlist(text string) (rules []string, err error) {
	err = contentLines(allowlistFile, text, func(line string) error {
		if strings.ContainsAny(line, " \t") {
			return agentlab.Errorf(agentlab.CodeInvalid, "%q is more than one rule", line)
		}
		rules = append(rules, line)
		return nil
	})
	if err == nil && len(rules) == 0 {
		err = agentlab.Errorf(agentlab.CodeInvalid, "%s has no rule", allowlistFile).
			WithHint("add one, or set network: profile in the defaults of %s", resourcesFile)
	}
	return rules, err
}

// vmResources are the resources of the VM of a repository; zero values are not set.
type vmResources struct {
	CPUs    int    `yaml:"cpus"`
	Memory  string `yaml:"memory"`
	Disk    string `yaml:"disk"`
	Profile string `yaml:"profile"`
	Network string `yaml:"network"`
}

// settings are the content of resources.yaml.
type settings struct {
	Defaults      vmResources            `yaml:"defaults"`
	Overrides     map[string]vmResources `yaml:"overrides"`
	MaxConcurrent int                    `yaml:"max_concurrent"`
}

// parseResources parses resources.yaml and checks all of its values.
func parseResources(data []byte) (settings, error) {
	cfg := settings{MaxConcurrent: 10}
	fault := func(err error) error {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s: %w", resourcesFile, err)
	}
	if err := strictyaml.Decode(data, &cfg); err != nil {
		return cfg, fault(err)
	}
	if cfg.MaxConcurrent < 1 {
		return cfg, fault(fmt.Errorf("max_concurrent is %d, less than 1", cfg.MaxConcurrent))
	}
	if _, err := cfg.Defaults.plan(); err != nil {
		return cfg, fault(fmt.Errorf("defaults: %w", err))
	}
	seen := map[string]bool{}
	for name, r := range cfg.Overrides {
		err := checkRepoName(name)
		if err == nil {
			_, err = r.plan()
		}
		if key := strings.ToLower(name); err == nil && seen[key] {
			err = fmt.Errorf("there is another entry that differs by case only")
		} else {
			seen[key] = true
		}
		if err != nil {
			return cfg, fault(fmt.Errorf("overrides: %s: %w", name, err))
		}
	}
	return cfg, nil
}

// vmPlan is what a VM gets.
type vmPlan struct {
	cores, memoryMB, diskGB int
	profile                 string
	allowlist               bool
}

// plan checks resources and converts them. What is not set has the default.
func (r vmResources) plan() (p vmPlan, err error) {
	p = vmPlan{cores: 4, memoryMB: 8 << 10, diskGB: 50, profile: "interactive", allowlist: true}
	if r.CPUs < 0 || r.CPUs > 1024 {
		return p, fmt.Errorf("cpus is %d, not 1 to 1024", r.CPUs)
	}
	p.cores = cmp.Or(r.CPUs, p.cores)
	if r.Memory != "" {
		if p.memoryMB, err = parseSize(r.Memory, "MiB"); err != nil {
			return p, fmt.Errorf("memory: %w", err)
		}
	}
	if r.Disk != "" {
		if p.diskGB, err = parseSize(r.Disk, "GiB"); err != nil {
			return p, fmt.Errorf("disk: %w", err)
		}
	}
	p.profile = cmp.Or(r.Profile, p.profile)
	switch r.Network {
	case "", "allowlist":
	case "profile":
		p.allowlist = false
	default:
		return p, fmt.Errorf("network is %q, not allowlist or profile", r.Network)
	}
	return p, agentlab.ValidateName(p.profile)
}

// parseSize parses a size such as 8GiB and returns it in unit, MiB or GiB.
func parseSize(text, unit string) (int, error) {
	units := []string{"MiB", "GiB", "TiB"}
	for i, u := range units {
		number, ok := strings.CutSuffix(text, u)
		if !ok {
			continue
		}
		n, err := strconv.Atoi(strings.TrimSpace(number))
		if err != nil || n < 1 || n > 1<<20 {
			break
		}
		mib := n << (10 * i)
		if unit == "MiB" {
			return mib, nil
		}
		if mib%1024 != 0 {
			return 0, fmt.Errorf("%s is not a whole number of GiB", text)
		}
		return mib / 1024, nil
	}
	return 0, fmt.Errorf("%q is not a size such as 8GiB (units: %s)", text, strings.Join(units, ", "))
}

// planFor returns what the VM of a repository gets.
func (c settings) planFor(repo string) (vmPlan, error) {
	r := c.Defaults
	for name, o := range c.Overrides {
		if strings.EqualFold(name, repo) {
			r = vmResources{
				CPUs: cmp.Or(o.CPUs, r.CPUs), Memory: cmp.Or(o.Memory, r.Memory), Disk: cmp.Or(o.Disk, r.Disk),
				Profile: cmp.Or(o.Profile, r.Profile), Network: cmp.Or(o.Network, r.Network),
			}
		}
	}
	return r.plan()
}

// profileText derives the profile of a repository from another one. JSON is YAML.
func (p vmPlan) profileText(name, base string, rules []string) (string, error) {
	var doc map[string]any
	if err := yaml.Unmarshal([]byte(base), &doc); err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "profile %s: %w", p.profile, err)
	}
	set := func(section, key string, value any) {
		m, _ := doc[section].(map[string]any)
		if m == nil {
			m = map[string]any{}
			doc[section] = m
		}
		m[key] = value
	}
	doc["name"] = name
	set("resources", "cores", p.cores)
	set("resources", "memory_mb", p.memoryMB)
	set("storage", "root_size_gb", p.diskGB)
	if p.allowlist {
		if m, _ := doc["network"].(map[string]any); m["mode"] == agentlab.NetworkOff {
			return "", agentlab.Errorf(agentlab.CodeInvalid, "profile %s has network.mode off, which %s would open", p.profile, allowlistFile).
				WithHint("set network: profile in %s", resourcesFile)
		}
		set("network", "mode", agentlab.NetworkAllowlist)
		set("network", "allow", rules)
	}
	var out bytes.Buffer
	out.WriteString("# Written by 'agentlab sessionizer' at each start, from its files and profile " + p.profile + ".\n")
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err := enc.Encode(doc)
	return profileMark(out.String()) + out.String(), err
}

// profileMark is the first line of the profiles that the sessionizer writes. It has a
// checksum of the rest, so that a profile that was edited is not taken for one of them.
func profileMark(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "# sessionizer " + hex.EncodeToString(sum[:]) + "\n"
}

// written reports whether a profile is exactly as the sessionizer wrote it.
func written(text string) bool {
	_, rest, ok := strings.Cut(text, "\n")
	return ok && text == profileMark(rest)+rest
}

// readFile reads a file in dir, which is created with an example if it is
// missing. A file that the user has emptied stays empty.
func readFile(dir, name string) (string, error) {
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", work.LocalFault(dir, err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		_, err = f.WriteString(examples[name])
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			_ = os.Remove(path)
			return "", work.LocalFault(path, err)
		}
	} else if !os.IsExist(err) {
		return "", work.LocalFault(path, err)
	}
	st, err := os.Stat(path)
	if err == nil && st.Size() > maxFile {
		return "", agentlab.Errorf(agentlab.CodeLimit, "%s has more than %s", path, work.ByteSize(int64(maxFile)))
	}
	if err != nil {
		return "", work.LocalFault(path, err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return "", work.LocalFault(path, err)
	}
	return string(data), nil
}

// The lines of the selection.
const (
	runningMark   = "[RUNNING] "
	menuSeparator = "─────────────────────────────────"
)

// menu returns the lines of the selection: running repositories with their work trees,
// a separator, others.
func menu(entries []Entry) []string {
	var running, others []string
	for _, e := range entries {
		if e.Running {
			running = append(running, runningMark+e.Repo)
			for _, branch := range e.Worktrees {
				running = append(running, runningMark+e.Repo+"/"+branch)
			}
		} else {
			others = append(others, e.Repo)
		}
	}
	if len(running) > 0 && len(others) > 0 {
		running = append(running, menuSeparator)
	}
	return slices.Concat(running, others)
}

// chosenLine returns the repository or work tree of a line of menu; "" for the
// separator.
func chosenLine(line string) string {
	line = strings.TrimSpace(strings.TrimPrefix(strings.TrimRight(line, "\n"), runningMark))
	if line == menuSeparator {
		return ""
	}
	return line
}
