package profile

import (
	"regexp"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// hostMount matches the names, in lower-case letters and digits only, of
// options that give a guest access to a directory of its host in virtual
// machine tools. No key of the schema may match it (a test checks that).
var hostMount = regexp.MustCompile(`mount|volume|hostpath|hostdir|hostfolder|hostshare|virtfs|virtiofs|9p|p9|plan9|fsdev|sharedfolder|shareddir|sharedir|^binds?$|^shares?$|^shared$|^filesystems?$|^mp[0-9]+$|^smb|^nfs`)

var notAlnum = regexp.MustCompile(`[^a-z0-9]+`)

func isHostMount(key string) bool {
	return hostMount.MatchString(notAlnum.ReplaceAllString(strings.ToLower(key), ""))
}

// refuseHostMounts looks at every key at every depth, before the schema does:
// a user who asks for a host directory gets the reason why there is none, instead of that
// the key is unknown.
func refuseHostMounts(y *strictyaml.Document) error {
	for _, k := range y.Keys() {
		if isHostMount(k.Name) {
			return y.At(agentlab.Errorf(agentlab.CodeDenied, "sandboxes cannot use directories of the host").WithField(k.Path).
				WithHint("host mounts would let an agent read and change files outside its sandbox; give it a repository (--repo), and take results from its artifacts or 'agentlab job fetch'"))
		}
	}
	return nil
}
