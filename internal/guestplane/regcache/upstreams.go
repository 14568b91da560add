package regcache

import (
	"net/url"

	"github.com/agentlab-vm/agentlab/internal/config"
)

// Configured returns the part of a Config that is in config.yaml, whose values were
// checked when the file was read.
func Configured(c config.Cache) Config {
	to := func(text string) (u *url.URL) {
		if text != "" {
			u, _ = config.RegistryURL(text)
		}
		return u
	}
	out := Config{Dir: c.Dir, MaxBytes: int64(c.MaxGB) << 30, Upstreams: Upstreams{
		NPM: to(c.NPM), PyPI: to(c.PyPI), PyPIFiles: c.PyPIFiles, Go: to(c.Go), Docker: to(c.Docker), DockerAuth: to(c.DockerAuth),
	}}
	for _, m := range c.Apt {
		out.Upstreams.Apt = append(out.Upstreams.Apt, to(m))
	}
	return out
}

// Upstreams are the registries. A nil URL turns a kind off. A URL has no final
// slash.
type Upstreams struct {
	NPM        *url.URL
	PyPI       *url.URL // of the simple index
	PyPIFiles  []string // HOST[:PORT] of files of the index, in addition to its own
	Go         *url.URL
	Apt        []*url.URL // mirrors; the host and port of each are those that guests ask for
	Docker     *url.URL
	DockerAuth *url.URL // where tokens for anonymous downloads come from
}

// of returns the URL of a kind other than Apt.
func (u Upstreams) of(k Kind) *url.URL {
	return map[Kind]*url.URL{NPM: u.NPM, PyPI: u.PyPI, Go: u.Go, Docker: u.Docker}[k]
}

func (u Upstreams) has(k Kind) bool {
	if k == Apt {
		return len(u.Apt) > 0
	}
	return u.of(k) != nil
}
