package image

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// source is one entry of apt's sources.
type source struct {
	uri        string
	suite      string
	components []string
	signedBy   string // path of a keyring; "" for the host's trusted ones
}

func (s source) line() string {
	opts := ""
	if s.signedBy != "" {
		opts = "[signed-by=" + s.signedBy + "] "
	}
	return strings.TrimRight(fmt.Sprintf("deb %s%s %s %s", opts, s.uri, s.suite, strings.Join(s.components, " ")), " ") + "\n"
}

// source returns the repository for the system with that code name.
func (a Repository) source(system string) source {
	name := ""
	if d := suites[system]; d != nil {
		name = d.name
	}
	r := strings.NewReplacer("{suite}", system, "{distribution}", name)
	return source{uri: r.Replace(a.URL), suite: r.Replace(a.Suite), components: a.Components, signedBy: a.keyring()}
}

// keyring is the path of the repository's key in the image.
func (a Repository) keyring() string { return "/etc/apt/keyrings/" + a.Name + ".asc" }

// sources returns the package sources for the recipe, on a host whose apt
// configuration is below etcApt (normally /etc/apt).
func (r *Recipe) sources(etcApt string) []source {
	if r.Mirror == MirrorHost {
		if s := hostSources(etcApt, r.Suite, r.Components); len(s) > 0 {
			return s
		}
	}
	return r.publicSources()
}

// publicSources returns the sources of the recipe or of its distribution. They
// are also the sources of the image.
func (r *Recipe) publicSources() []source {
	d := r.distribution()
	mirror := r.Mirror
	if mirror == MirrorHost {
		mirror = d.mirrors[r.Arch]
	}
	var out []source
	for _, p := range pockets(r.Suite) {
		s := source{uri: mirror, suite: p, components: r.Components, signedBy: d.keyring}
		if d.security != "" && strings.HasSuffix(p, "-security") {
			s.uri = d.security
		}
		out = append(out, s)
	}
	return out
}

// hostSources reads apt's sources below etcApt and returns those of the suite
// and its pockets, none if the suite itself is not among them. Unreadable
// files are skipped: apt itself reports them.
func hostSources(etcApt, suite string, components []string) []source {
	var found []source
	lists, _ := filepath.Glob(filepath.Join(etcApt, "sources.list.d", "*.list"))
	for _, f := range append([]string{filepath.Join(etcApt, "sources.list")}, lists...) {
		if data, err := os.ReadFile(f); err == nil {
			found = append(found, parseSourcesList(data)...)
		}
	}
	stanzas, _ := filepath.Glob(filepath.Join(etcApt, "sources.list.d", "*.sources"))
	for _, f := range stanzas {
		if data, err := os.ReadFile(f); err == nil {
			found = append(found, parseDeb822Sources(data)...)
		}
	}
	var out []source
	main := false
	for _, s := range found {
		s.components = slices.DeleteFunc(slices.Clone(s.components), func(c string) bool { return !slices.Contains(components, c) })
		if len(s.components) == 0 || !slices.Contains(pockets(suite), s.suite) {
			continue
		}
		main = main || s.suite == suite
		out = append(out, s)
	}
	if !main {
		return nil
	}
	return out
}

// parseSourcesList reads the one-line format of sources.list(5).
func parseSourcesList(data []byte) []source {
	var out []source
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb ")
		if !ok {
			continue
		}
		rest = strings.TrimSpace(rest)
		var s source
		if strings.HasPrefix(rest, "[") {
			opts, after, ok := strings.Cut(rest[1:], "]")
			if !ok {
				continue
			}
			for _, o := range strings.Fields(opts) {
				if key, ok := strings.CutPrefix(o, "signed-by="); ok {
					s.signedBy = key
				}
			}
			rest = after
		}
		fields := strings.Fields(rest)
		if len(fields) < 3 {
			continue
		}
		s.uri, s.suite, s.components = fields[0], fields[1], fields[2:]
		out = append(out, s)
	}
	return out
}

// parseDeb822Sources reads the stanza format of sources.list(5).
func parseDeb822Sources(data []byte) []source {
	var out []source
	for _, st := range parseStanzas(data) {
		if !slices.Contains(strings.Fields(st["types"]), "deb") || strings.EqualFold(st["enabled"], "no") {
			continue
		}
		signedBy := st["signed-by"]
		if !strings.HasPrefix(signedBy, "/") {
			signedBy = "" // an inline key; the host's trusted keys are used
		}
		for _, uri := range strings.Fields(st["uris"]) {
			for _, suite := range strings.Fields(st["suites"]) {
				out = append(out, source{uri, suite, strings.Fields(st["components"]), signedBy})
			}
		}
	}
	return out
}

// parseStanzas reads the deb822 format: paragraphs of "Key: value" with
// continuation lines, which are joined by a space. Keys become lower case.
func parseStanzas(data []byte) []map[string]string {
	var out []map[string]string
	var stanza map[string]string
	key := ""
	for line := range strings.SplitSeq(string(data), "\n") {
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			stanza, key = nil, ""
		case line[0] == ' ' || line[0] == '\t':
			if key != "" {
				stanza[key] += " " + strings.TrimSpace(line)
			}
		default:
			k, v, ok := strings.Cut(line, ":")
			if !ok {
				key = ""
				continue
			}
			if stanza == nil {
				stanza = map[string]string{}
				out = append(out, stanza)
			}
			key = strings.ToLower(strings.TrimSpace(k))
			stanza[key] = strings.TrimSpace(v)
		}
	}
	return out
}

// hostAptPrefixes are the settings of the host's apt for access to a mirror.
// mmdebstrap's apt does not read the host's settings.
var hostAptPrefixes = []string{
	"acquire::http::", "acquire::https::", "acquire::check-valid-until", "acquire::check-date",
	"acquire::max-futuretime", "acquire::forceipv4", "acquire::forceipv6", "acquire::retries",
	"acquire::by-hash", "acquire::queue-mode",
}

// hostAptConf returns those settings in apt.conf(5)'s format, and where the
// host keeps its mirrors' credentials. The settings are used during the build only.
func hostAptConf(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "apt-config", "dump").Output()
	if err != nil {
		return "" // no apt-config, no apt; preflight reports it
	}
	var conf strings.Builder
	for line := range strings.SplitSeq(string(out), "\n") {
		name, _, _ := strings.Cut(strings.ToLower(line), " ")
		if slices.ContainsFunc(hostAptPrefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
			conf.WriteString(line + "\n")
		}
	}
	if _, err := os.Stat("/etc/apt/auth.conf"); err == nil {
		conf.WriteString("Dir::Etc::netrc \"/etc/apt/auth.conf\";\n")
	}
	if _, err := os.Stat("/etc/apt/auth.conf.d"); err == nil {
		conf.WriteString("Dir::Etc::netrcparts \"/etc/apt/auth.conf.d\";\n")
	}
	return conf.String()
}

// stanza returns the source in deb822 format.
func (s source) stanza() string {
	text := fmt.Sprintf("Types: deb\nURIs: %s\nSuites: %s\n", s.uri, s.suite)
	if len(s.components) > 0 {
		text += "Components: " + strings.Join(s.components, " ") + "\n"
	}
	return text + "Signed-By: " + s.signedBy + "\n"
}

// sourcesFile returns the image's own sources, in deb822 format.
func (r *Recipe) sourcesFile() string {
	var stanzas []string
	for _, s := range r.publicSources() {
		stanzas = append(stanzas, s.stanza())
	}
	return strings.Join(stanzas, "\n")
}
