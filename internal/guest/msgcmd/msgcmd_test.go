package msgcmd

import (
	"bytes"
	"context"
	"strings"
	"testing"
)

func TestHelpIsPrintedToStdout(t *testing.T) {
	for _, tc := range []struct {
		lease bool
		args  string
		want  string
		code  int
	}{
		{false, "--help", usage, 0},
		{false, "-h", usage, 0},
		{false, "help", usage, 0},
		{false, "tail --help", usage, 0},
		{false, "post -h", usage, 0},
		{true, "--help", leaseUsage, 0},
		{true, "renew --help", leaseUsage, 0},
		{false, "tail --unknown", "", 2},
		{false, "", "", 2},
		{true, "other", "", 2},
	} {
		var out, errOut bytes.Buffer
		code := 0
		if args := strings.Fields(tc.args); tc.lease {
			code = runLease(context.Background(), t.TempDir(), args, &out, &errOut)
		} else {
			code = run(context.Background(), t.TempDir(), args, strings.NewReader(""), &out, &errOut)
		}
		if code != tc.code || out.String() != tc.want || (errOut.Len() > 0) != (tc.code != 0) {
			t.Errorf("%q: exit code %d, stdout %q, stderr %q", tc.args, code, out.String(), errOut.String())
		}
	}
}
