package devproxy

import (
	"cmp"
	"encoding/json"
	"os"
	"slices"

	"github.com/agentlab-vm/agentlab/internal/durable"
)

// record is the content of the file: after a restart the ports have the same numbers,
// and those of stopped projects still have their page.
type record struct {
	Ports   []portRecord `json:"ports"`
	Seen    []seenRecord `json:"seen"`
	DNSPort uint16       `json:"dns_port,omitempty"`
}

type portRecord struct {
	Guest uint16 `json:"guest"`
	Host  uint16 `json:"host"`
}

type seenRecord struct {
	Project string `json:"project"`
	Port    uint16 `json:"port"`
}

// load reads the file. A file that cannot be read is as none: it is only a convenience.
func (s *Service) load() {
	if s.cfg.File == "" {
		return
	}
	data, err := os.ReadFile(s.cfg.File)
	var r record
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		if !os.IsNotExist(err) {
			s.log.Warn("the record of ports cannot be read", "file", s.cfg.File, "err", err)
		}
		return
	}
	for _, p := range r.Ports {
		s.hostPort[p.Guest] = p.Host
	}
	for _, k := range r.Seen {
		s.seen[seenKey{k.Project, k.Port}] = s.cfg.Clock()
	}
	s.dnsPort = r.DNSPort
}

// save writes the file if its content has changed.
func (s *Service) save() {
	if s.cfg.File == "" {
		return
	}
	s.saveMu.Lock()
	defer s.saveMu.Unlock()
	data, err := json.Marshal(s.record())
	if err != nil || string(data) == s.saved {
		return
	}
	if err := durable.Replace(s.cfg.File, data, durable.Content); err != nil {
		s.log.Warn("the record of ports cannot be written", "file", s.cfg.File, "err", err)
		return
	}
	s.saved = string(data)
}

// record returns the content of the file.
func (s *Service) record() record {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := record{Ports: []portRecord{}, Seen: []seenRecord{}, DNSPort: s.dnsPort}
	for guest, f := range s.fronts {
		if f.host != 0 {
			r.Ports = append(r.Ports, portRecord{guest, f.host})
		}
	}
	for _, w := range s.watchers {
		for _, l := range w.listeners {
			r.Seen = append(r.Seen, seenRecord{w.project, l.Port})
		}
	}
	for k := range s.seen {
		r.Seen = append(r.Seen, seenRecord{k.project, k.port})
	}
	slices.SortFunc(r.Ports, func(a, b portRecord) int { return cmp.Compare(a.Guest, b.Guest) })
	slices.SortFunc(r.Seen, func(a, b seenRecord) int {
		return cmp.Or(cmp.Compare(a.Project, b.Project), cmp.Compare(a.Port, b.Port))
	})
	return r
}
