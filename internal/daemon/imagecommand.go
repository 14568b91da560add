package daemon

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/image"
)

const imageUsage = `agentlabd image prepares the disk of a template; used by create_template.sh.

Usage:
  agentlabd image stage [OPTIONS] NAME [DIR]
                          write what the build scripts need for the image NAME
                          to the directory DIR, which must exist; print a key
                          that identifies it. Without DIR, print the key only

  --recipe FILE  a YAML recipe; default: the shipped recipe of that name
  --suite NAME   code name of the system of the cloud image; default: the recipe's
  --runner FILE  the program agent-runner for the template
`

// imageCommand runs 'agentlabd image'.
func imageCommand(ctx context.Context, args []string, stdout io.Writer) error {
	fs := flag.NewFlagSet("agentlabd image", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	recipe := fs.String("recipe", "", "")
	o := image.StageOptions{Kind: image.Cloud}
	fs.StringVar(&o.Suite, "suite", "", "")
	fs.StringVar(&o.Runner, "runner", "", "")
	if len(args) == 0 || args[0] != "stage" || fs.Parse(args[1:]) != nil || fs.NArg() < 1 || fs.NArg() > 2 {
		return config.Usage(imageUsage)
	}
	req := image.BuildRequest{Name: fs.Arg(0)}
	if *recipe != "" {
		text, err := os.ReadFile(*recipe)
		if err != nil {
			return err
		}
		req.Recipe = string(text)
	}
	r, err := req.Parse()
	if err != nil {
		return err
	}
	if dir := fs.Arg(1); dir != "" {
		if err := r.Stage(ctx, o, dir); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintln(stdout, r.StageKey(o.Kind))
	return err
}
