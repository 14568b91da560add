package vmdir

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestName(t *testing.T) {
	const vmid = 105
	mark := agentlab.NewUID()
	if got, uid, ok := ParseName(Name(vmid, mark)); !ok || got != vmid || uid != mark {
		t.Errorf("%q is read as %d, %q, %v", Name(vmid, mark), got, uid, ok)
	}
	for _, bad := range []string{
		"", "105", "105-", "-" + mark, "0-" + mark, "0105-" + mark, "-1-" + mark, "105-../../etc/passwd/aaaaaaaaaa", "1-../x",
		"105-" + mark + "a", "105-" + strings.ToUpper(mark), "99999999999999999999-" + mark, TrashPrefix + Name(vmid, mark),
	} {
		if vmid, uid, ok := ParseName(bad); ok {
			t.Errorf("%q is read as %d, %q", bad, vmid, uid)
		}
	}
}
